# SPDX-License-Identifier: Apache-2.0
"""Requests that nobody has seen before: Hypothesis strategies over a server's OpenAPI schema.

Owns: what is drawn for each endpoint and property, and the bounds that keep a legal request short.
Never: sends anything, or names a property that has only ordinary values: those come from the schema.

Ordering rule: a body is drawn whole and bounded last, so that no draw can make a legal request long.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

MAX_TOKENS = 3
MAX_N = 4
LEGAL_LENGTH = 600
"""Above it no number of tokens is legal: it stays as it was drawn, since it is refused."""


@dataclass(frozen=True)
class HostileRequest:
    """``body`` is sent as it is."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.headers} {self.body[:2000]!r}"


# Values for a property of any type

NUMBERS: list[Any] = [
    *(0, 1, 2, 3, -1, -2, 20, 21, 511, 512, 513, 2**15, 2**16),
    *(2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64),
    *(10**30, -(10**30), 10**400, 0.5, 1.0, -0.0, 1.5, 1e-20, 5e-324, 1e38, 1e39, 1e308, -1e308),
    *(math.nan, math.inf, -math.inf),
]
TEXTS: list[str] = [
    *(
        "",
        " ",
        "a",
        "1",
        "512",
        "nan",
        "null",
        "\x00",
        "\ud800",
        "a\udfff",
        "\ufeff",
        "\u202e",
        "\U0001f600",
        "e\u0301",
    ),
    *("%s", "{{ 1/0 }}", "{% for i in range(9) %}x{% endfor %}", "[", "(", "\\", '"', "<|im_end|>", "../../etc/passwd"),
    *("a" * 5000, "\u20ac" * 700),
]
DEEP = json.loads("[" * 60 + "]" * 60)
OTHERS: list[Any] = [
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    [{}],
    {"": None},
    {"a": {"a": [1, "a", None]}},
    DEEP,
    [0] * 700,
]
ANYTHING = st.sampled_from([*NUMBERS, *TEXTS, *OTHERS])

TOKEN_IDS = st.one_of(
    st.lists(st.integers(0, 511), min_size=1, max_size=40),
    st.lists(st.sampled_from([0, 5, 510, 511, 512, 513, 2**31, 2**63, 10**30, -1]), min_size=1, max_size=5),
    st.sampled_from([[511], [512], [5, 512], [5, -1], [5, 1.5], [5, True], [5, "a"], [5, None], [5, [6]], [5] * 511]),
    st.sampled_from([[5] * 512, [5] * 513, [5.0], ["5"], [5, math.nan], [0], []]),
)
PROMPTS = st.one_of(
    TOKEN_IDS,
    st.lists(TOKEN_IDS, max_size=6),
    st.sampled_from(
        [*TEXTS, [[5, 6], "a"], ["a", ""], ["a"] * 6, ["\ud800"], [[]], [[5], []], [], {}, {"prompt_token_ids": [5]}]
    ),
    st.sampled_from([{"prompt_embeds": "AAAA"}, [{"prompt": "a"}], [{"prompt_token_ids": [512]}], "a " * 900]),
)

# A schema, expression or tag that a compiler of grammars has to refuse, or to bear.
JSON_SCHEMAS: list[Any] = [
    *({}, {"type": "objectt"}, {"type": 5}, {"$ref": "#/nowhere"}, {"$ref": "http://127.0.0.1:9/x"}, {"$ref": "#"}),
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "string", "pattern": "["},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "integer", "minimum": 10**30},
    {"type": "integer", "minimum": 5, "maximum": 1},
    {"type": "array", "minItems": 10**9},
    {"type": "array", "minItems": -1},
    {"type": "string", "maxLength": -1},
    {"enum": []},
    {"enum": [math.nan, "\ud800"]},
    {"anyOf": []},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"not": {}},
    {"properties": 5},
    {"properties": {"\x00": {"type": "null"}}, "required": ["b"]},
    *("", "{", "5", "null", "[]", '"a"', '{"type": "object"}', "\x00", True, 5, None, [], [{}]),
]
REGEXES: list[Any] = [
    *("", "[", "(", "*", "a{3,1}", "a{99999999999}", "(a*)*b", "(?<=a)b", r"\1", r"(a)\1", "(?P<n>a)", "\\", "[z-a]"),
    *(
        "a{0}",
        "^$",
        "$^",
        r"\d+",
        "[^\\x00-\\U0010FFFF]",
        "\x00",
        "\ud800",
        "\u20ac+",
        r"\p{L}",
        "a|",
        "|",
        "(?i)a",
        r"\b",
    ),
    *(5, None, [], {}),
]
GRAMMARS: list[Any] = [
    *(
        "",
        "root ::=",
        "root ::= root",
        'root ::= "a"',
        "root ::= b",
        "a ::= 'a'",
        "start: 'a'",
        "start: start",
        "?start: A",
    ),
    *(
        'root ::= "a" | root root',
        "::=",
        "\x00",
        "\ud800",
        'root ::= ""',
        "root ::= [^]",
        "root ::= [z-a]",
        5,
        None,
        [],
    ),
]
TAGS: list[Any] = [
    *("", "{", "{}", "[]", "5", 5, None, {}, [], '{"type": "structural_tag"}', '{"structures": [], "triggers": []}'),
    '{"type": "structural_tag", "format": {"type": "any_text"}}',
    '{"type": "structural_tag", "format": {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": ""}}',
    '{"type": "structural_tag", "format": {"type": "const_string", "value": ""}}',
    '{"structures": [{"begin": "<a>", "schema": {"type": "objectt"}, "end": ""}], "triggers": ["<a"]}',
    '{"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["b"]}',
    '{"structures": [{"begin": "", "schema": {}, "end": ""}], "triggers": [""]}',
]
STRUCTURES: dict[str, list[Any]] = {
    "json": JSON_SCHEMAS,
    "regex": REGEXES,
    "choice": [
        [],
        [""],
        ["a"],
        ["a", "a"],
        ["\x00"],
        ["\ud800"],
        ['"'],
        ["a" * 900],
        ["\u20ac"],
        [5],
        [None],
        "a",
        5,
        None,
    ],
    "grammar": GRAMMARS,
    "json_object": [True, False, None, 5, "a"],
    "structural_tag": TAGS,
    "disable_any_whitespace": [True, False, 5],
    "disable_additional_properties": [True, 5],
    "whitespace_pattern": ["", "[", " *", 5],
    "_backend": ["", "xgrammar", "guidance", "outlines", "lm-format-enforcer", "nothing", 5],
    "_backend_was_auto": [True, 5],
}
STRUCTURED = st.one_of(
    st.sampled_from([(k, v) for k, values in STRUCTURES.items() for v in values]).map(lambda kv: {kv[0]: kv[1]}),
    st.dictionaries(st.sampled_from(list(STRUCTURES)), ANYTHING, max_size=3),
    st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in STRUCTURES.items()}),
)
FORMATS = st.one_of(
    st.sampled_from(["text", "json_object", "json_schema", "structural_tag", "regex", "", None]).map(
        lambda t: {"type": t}
    ),
    st.sampled_from(JSON_SCHEMAS).map(
        lambda s: {"type": "json_schema", "json_schema": {"name": "a", "schema": s, "strict": True}}
    ),
    st.sampled_from([None, 5, {}, {"name": "a"}, {"schema": {}}]).map(
        lambda s: {"type": "json_schema", "json_schema": s}
    ),
    st.sampled_from(TAGS).map(lambda t: {"type": "structural_tag", "format": t}),
    st.sampled_from(TAGS).map(lambda t: {"type": "structural_tag", "structures": [t], "triggers": [""]}),
)
IDS = st.sampled_from(
    [[], [0], [511], [512], [-1], [5, 5], [10**30], ["a"], [1.5], [None], list(range(512)), [5] * 3000]
)
NO_TOKEN = {str(token): -math.inf for token in range(512)}
"""A bias that leaves nothing to sample."""
BIASES = st.one_of(
    st.dictionaries(
        st.sampled_from(["0", "5", "511", "512", "-1", "", "a", "1.0", " 5", "+5", "0x5", "9" * 30, "\u0665", "5\x00"]),
        st.sampled_from([*NUMBERS, "1", "a", None, True, []]),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([0.0, -100, -1e308, 1e308, -math.inf]).map(lambda bias: dict.fromkeys(NO_TOKEN, bias)),
)
XARGS = st.dictionaries(
    st.sampled_from(["a", "", "\x00", "kv_transfer_params", "ec_transfer_params", "__class__", "seed", "watermark"]),
    st.one_of(
        st.sampled_from([*NUMBERS, *TEXTS]), st.lists(ANYTHING, max_size=3), st.just({"do_remote_prefill": True})
    ),
    max_size=3,
)
TRANSFER = st.dictionaries(
    st.sampled_from(
        ["do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_port", "a"]
    ),
    ANYTHING,
    max_size=4,
)
REPETITION = st.dictionaries(
    st.sampled_from(["max_pattern_size", "min_pattern_size", "min_count"]),
    st.sampled_from([*NUMBERS, 2, 5, "a"]),
    max_size=3,
)
PARTS: SearchStrategy[Any] = st.sampled_from(
    [
        *(
            None,
            5,
            "a",
            {},
            {"type": "text"},
            {"type": "text", "text": "\ud800"},
            {"type": "text", "text": "a"},
            {"type": "x"},
        ),
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"type": "prompt_embeds", "prompt_embeds": "AAAA"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "input_text", "text": "a"},
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "a"}]},
        {"type": "thinking", "thinking": "a"},
    ]
)
CALLS: SearchStrategy[Any] = st.sampled_from(
    [
        *(None, [], [{}], [None], 5),
        [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}],
        [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "5"}}],
        [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    ]
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer", "function", "", None, 5, "a\x00"])},
    optional={
        "content": st.one_of(st.sampled_from(TEXTS), st.lists(PARTS, max_size=3), ANYTHING),
        "tool_calls": CALLS,
        "tool_call_id": ANYTHING,
        "name": ANYTHING,
        "reasoning": ANYTHING,
    },
)
MESSAGES = st.one_of(st.lists(MESSAGE, max_size=3), st.sampled_from([[], {}, None, 5, "a", [[]], [5]]))
FUNCTIONS: list[Any] = [
    *(None, {}, {"name": ""}, {"name": "f"}, {"name": "f", "parameters": None}, {"name": "f" * 90, "parameters": {}}),
    *({"name": "f", "parameters": schema, "strict": True} for schema in JSON_SCHEMAS),
]
TOOLS = st.lists(
    st.one_of(
        st.sampled_from(FUNCTIONS).map(lambda f: {"type": "function", "function": f}),
        st.sampled_from(FUNCTIONS).map(lambda f: {"type": "function", **(f or {})}),
        st.sampled_from([{}, {"type": "mcp"}, {"type": "code_interpreter"}, {"type": "web_search_preview"}, None]),
        st.sampled_from(JSON_SCHEMAS).map(lambda s: {"name": "f", "input_schema": s}),
    ),
    max_size=3,
)
CHOICES = st.sampled_from(
    [
        *(
            "none",
            "auto",
            "required",
            "",
            None,
            {},
            5,
            {"type": "auto"},
            {"type": "any"},
            {"type": "tool", "name": "f"},
        ),
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "g"}},
        {"type": "function", "name": "f"},
    ]
)

SPECIAL: dict[str, SearchStrategy[Any]] = {
    "prompt": PROMPTS,
    "messages": MESSAGES,
    "input": st.one_of(MESSAGES, st.sampled_from(TEXTS)),
    "tokens": st.one_of(TOKEN_IDS, ANYTHING),
    "structured_outputs": STRUCTURED,
    "response_format": FORMATS,
    "text": FORMATS.map(lambda f: {"format": f}),
    "output_config": FORMATS.map(lambda f: {"format": f}),
    "logit_bias": BIASES,
    "allowed_token_ids": IDS,
    "stop_token_ids": IDS,
    "logprob_token_ids": IDS,
    "vllm_xargs": XARGS,
    "kv_transfer_params": TRANSFER,
    "ec_transfer_params": TRANSFER,
    "repetition_detection": REPETITION,
    "tools": TOOLS,
    "tool_choice": CHOICES,
    "stop": st.one_of(st.sampled_from(TEXTS), st.lists(st.sampled_from(TEXTS), max_size=5)),
    "stop_sequences": st.lists(st.sampled_from(TEXTS), max_size=5),
    "bad_words": st.lists(st.sampled_from(TEXTS), max_size=5),
    "model": st.sampled_from(["tiny", "other", "", "\ud800", None, 5, "tiny\x00"]),
    "stream": st.booleans(),
    "echo": st.booleans(),
    "ignore_eos": st.booleans(),
    "return_token_ids": st.booleans(),
    "use_beam_search": st.booleans(),
    "n": st.sampled_from([*NUMBERS, 2, 3, 4]),
    "temperature": st.sampled_from([*NUMBERS, 1.0, 0.7, 2.0]),
    "logprobs": st.sampled_from([*NUMBERS, 5, True, False]),
    "prompt_logprobs": st.sampled_from([*NUMBERS, 5]),
    "top_logprobs": st.sampled_from([*NUMBERS, 5]),
    "seed": st.sampled_from(NUMBERS),
}


def from_schema(schema: dict[str, Any], root: dict[str, Any], depth: int = 4) -> SearchStrategy[Any]:
    """What the schema allows, with the extremes of each type; ``depth`` ends recursive ones."""
    if "$ref" in schema:
        schema = root["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    if depth == 0:
        return st.none()
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema.get("const")])
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return st.deferred(lambda: st.one_of([from_schema(option, root, depth - 1) for option in options]))
    kind = schema.get("type")
    if kind == "integer":
        return st.one_of(st.integers(-3, 40), st.sampled_from([v for v in NUMBERS if isinstance(v, int)]))
    if kind == "number":
        return st.one_of(st.floats(), st.sampled_from(NUMBERS))
    if kind == "string":
        return st.one_of(st.text(max_size=12), st.sampled_from(TEXTS))
    if kind == "array":
        items = schema.get("items") or {}
        return st.deferred(lambda: st.lists(from_schema(items, root, depth - 1), max_size=4))
    if kind == "object":
        return st.deferred(lambda: _object(schema, root, depth))
    return st.booleans() if kind == "boolean" else st.none() if kind == "null" else ANYTHING


def _object(schema: dict[str, Any], root: dict[str, Any], depth: int) -> SearchStrategy[Any]:
    known = {name: from_schema(value, root, depth - 1) for name, value in (schema.get("properties") or {}).items()}
    required = [name for name in known if name in schema.get("required", ())]
    if known:
        return st.fixed_dictionaries(
            {name: known[name] for name in required}, optional={k: v for k, v in known.items() if k not in required}
        )
    more = schema.get("additionalProperties")
    values = from_schema(more, root, depth - 1) if isinstance(more, dict) else ANYTHING
    return st.dictionaries(st.text(max_size=6), values, max_size=3)


# Bodies

CHAT = [{"role": "user", "content": "How many?"}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6, 7], "temperature": 0.0},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/chat/completions/batch": {"messages": [CHAT, CHAT]},
    "/v1/responses": {"input": "How many?"},
    "/v1/messages": {"model": "tiny", "messages": CHAT},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": CHAT},
    "/tokenize": {"prompt": "How many?"},
    "/detokenize": {"tokens": [5, 6]},
    "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": {}},
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [5, 6]},
    "/invocations": {"prompt": [5, 6, 7]},
}
"""A legal request for each endpoint that answers; those that pause, scale or reset the server are not asked."""

WEIGHTS = {"/v1/completions": 6, "/v1/chat/completions": 4}


def endpoints(root: dict[str, Any]) -> list[str]:
    return [path for path in ENDPOINTS if "post" in root["paths"].get(path, {})]


def properties_of(path: str, root: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of a request's body, by name; of all its kinds where it has several."""
    content = root["paths"][path]["post"].get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    found: dict[str, dict[str, Any]] = {}
    for kind in schema.get("anyOf", [schema]):
        if "$ref" in kind:
            found |= root["components"]["schemas"][kind["$ref"].rsplit("/", 1)[1]].get("properties", {})
    if not found:  # it reads its body by itself
        found = {name: {} for name in ENDPOINTS[path]}
    return found


HEADERS = st.dictionaries(
    st.sampled_from(
        [
            "X-Request-Id",
            "X-data-parallel-rank",
            "X-Session-ID",
            "X-Vllm-Priority",
            "traceparent",
            "endpoint-load-metrics-format",
        ]
    ),
    st.sampled_from(
        ["", "a", "\xff\xfe", "\xe2\x82", "a" * 3000, "0", "1", "-1", "9" * 40, "1.5", "nan", "%00", "a b;c=\t"]
    ),
    max_size=2,
)
CONTENT_TYPES = ["text/plain", "application/json; charset=utf-16", "", "multipart/form-data", "application/xml", "\xff"]
RAW = [
    *(
        b"",
        b"{",
        b"null",
        b"5",
        b'"a"',
        b"[]",
        b"[{}]",
        b"NaN",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b"[" * 20000,
        b"{}" * 3,
    ),
    *(
        b'{"prompt": "\\ud800"}',
        b'{"prompt": [5], "prompt": [512]}',
        b'{"a":' * 2000,
        b'{"prompt": [' + b"9" * 5000 + b"]}",
    ),
    *(b'{"prompt": "\xff"}', b'{"prompt": "a\x00"}', b"prompt=a", "{}".encode("utf-16")),
]


def requests(root: dict[str, Any]) -> SearchStrategy[HostileRequest]:
    paths = [path for path in endpoints(root) for _ in range(WEIGHTS.get(path, 1))]
    drawn = {path: _bodies(path, root) for path in endpoints(root)}
    return st.sampled_from(paths).flatmap(
        lambda path: st.one_of(
            *[drawn[path]] * 8,
            st.tuples(st.sampled_from(RAW), st.sampled_from(["application/json", *CONTENT_TYPES])).map(
                lambda raw: HostileRequest("POST", path, raw[0], {"Content-Type": raw[1]})
            ),
            st.sampled_from(CONTENT_TYPES).map(
                lambda kind: HostileRequest(
                    "POST", path, encode(bounded(path, ENDPOINTS[path])), {"Content-Type": kind}
                )
            ),
        )
    )


def _bodies(path: str, root: dict[str, Any]) -> SearchStrategy[HostileRequest]:
    """The legal request with a few properties exchanged, or with one left out."""
    properties = properties_of(path, root)
    values = {
        name: st.one_of(*([SPECIAL[name]] * 2 if name in SPECIAL else []), from_schema(schema, root), ANYTHING)
        for name, schema in properties.items()
    }
    changed = st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: values[name] for name in names})
    )
    left_out = st.sampled_from([None, None, None, None, *ENDPOINTS[path]])
    headers: SearchStrategy[dict[str, str]] = st.one_of(st.just({}), st.just({}), HEADERS)

    def build(change: dict[str, Any], missing: str | None, more: dict[str, str]) -> HostileRequest:
        body = {**ENDPOINTS[path], **change}
        body.pop(missing or "", None)
        return HostileRequest("POST", path, encode(bounded(path, body)), {"Content-Type": "application/json", **more})

    return st.builds(build, changed, left_out, headers)


def bounded(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A legal request ends after ``MAX_TOKENS`` tokens in at most ``MAX_N`` outputs; an illegal one stays illegal."""
    body = dict(body)
    limit = {"/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_completion_tokens"}.get(
        path, "max_tokens"
    )
    limits = {limit, "max_tokens"} if path != "/v1/responses" else {limit}
    for name in limits:
        if _legal(body.get(name, 16), LEGAL_LENGTH):
            body[name] = MAX_TOKENS
    if MAX_TOKENS < _number(body.get("min_tokens")) <= LEGAL_LENGTH:
        body["min_tokens"] = MAX_TOKENS
    if body.get("n") is not None and _legal(body["n"], 10**6):
        body["n"] = min(int(_number(body["n"])), MAX_N)
    return body


def _number(value: Any) -> float:
    """As the server reads it: a text of a number is one."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _legal(value: Any, most: int) -> bool:
    return value is None or 0 < _number(value) <= most


def encode(body: Any) -> bytes:
    """JSON as Python writes it: NaN and Infinity bare, lone surrogates as escapes."""
    return json.dumps(body).encode()
