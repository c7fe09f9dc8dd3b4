# SPDX-License-Identifier: Apache-2.0
"""A stand-in for `vllm serve` in the demo's tests: /health, and a chat endpoint that streams a fixed answer.

    stub_server.py PORT [crash | never-healthy | chat-error | no-hit | other-answer | other-logprobs]

It also keeps a child process, as vLLM does, which must go away with it.
"""

import json
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODE = sys.argv[2] if len(sys.argv) > 2 else "works"
PIECES = ("An", "swer ", "number ")


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.send_response(503 if MODE == "never-healthy" else 200)
        self.end_headers()

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if MODE == "chat-error":
            body = json.dumps({"error": {"message": "no such prompt", "type": "BadRequestError", "code": 400}}).encode()
            self.send_response(400)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        turn = len(request["messages"]) // 2
        warm = "cache_salt" not in request
        for piece in (*PIECES, "other" if MODE == "other-answer" and warm else str(turn)):
            logprob = -0.5 - (1e-3 if MODE == "other-logprobs" and warm else 0)
            logprobs = {"content": [{"token": piece, "logprob": logprob, "bytes": None, "top_logprobs": []}]}
            choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None, "logprobs": logprobs}
            self.chunk([choice], None)
            time.sleep(0.01)
        reused = turn - 1 if warm and MODE != "no-hit" else 0
        usage = {
            "prompt_tokens": 10 * turn,
            "completion_tokens": len(PIECES) + 1,
            "total_tokens": 10 * turn + len(PIECES) + 1,
            "prompt_tokens_details": {"cached_tokens": reused} if reused else None,
        }
        self.chunk([], usage)
        self.wfile.write(b"data: [DONE]\n\n")

    def chunk(self, choices, usage):
        event = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "stub", "choices": choices}
        self.wfile.write(f"data: {json.dumps({**event, 'usage': usage})}\n\n".encode())
        self.wfile.flush()


if __name__ == "__main__":
    print("stub server starts", flush=True)
    if MODE == "crash":
        print("ValueError: this flag does not fit", flush=True)
        sys.exit(3)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    print("child", child.pid, flush=True)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
