# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt comes in pieces (vLLM's streaming input): what each piece is answered with, and what it leaves.

A piece is answered as a plain request is whose prompt is all that came before, the answers included but for the last
token of each, which vLLM drops. That request is run cold, under a cache salt of its own, and must have the same bits:
the pieces here are such that no answer runs over a boundary, whose checkpoint would be made by decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vllm_gaudi.testing.engine import DEFAULTS, Engine, Result, greedy

BLOCK = DEFAULTS["block_size"]
ANSWER = 4
PIECES = (20, 13, 44, 5)
"""Tokens; with the three that are kept of each answer the ends of the pieces are 20, 36, 83, 91 tokens."""


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [10 + (i * i * 7 + i * 13 + salt * 101) % 480 for i in range(length)]


def pieces_of(salt: int) -> list[list[int]]:
    return [prompt_of(length, salt + i) for i, length in enumerate(PIECES)]


@dataclass
class Session:
    """One request of ``it`` that is given piece after piece, and what it was answered."""

    it: Engine
    name: str
    tokens: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    def send(self, piece: Sequence[int], params: SamplingParams, is_last: bool = False) -> None:
        """As ``AsyncLLM.generate`` does with each ``StreamingInput``; the last one only ends the session."""
        engine = self.it.vllm_engine
        request = engine.input_processor.process_inputs(
            self.name, {"prompt_token_ids": list(piece)}, params, ("generate",), resumable=not is_last
        )
        request.external_req_id = self.name
        engine.engine_core.add_request(request)

    def end(self) -> None:
        self.send([0], greedy(1), is_last=True)

    @property
    def logits(self) -> list[torch.Tensor]:
        """Rows that its tokens were chosen from; asynchronous scheduling may have added one that nobody sees."""
        return self.it._rows[self.name]


def rest(it: Engine, *sessions: Session) -> None:
    """Step until nothing is left to do: plain requests have finished, sessions wait for a piece or have ended."""
    by_name = {session.name: session for session in sessions}
    for _ in range(2000):
        if not it.scheduler.has_requests() and not it.core.batch_queue:
            return
        for output in it.vllm_engine.engine_core.get_output().outputs:
            session = by_name.get(output.request_id)
            if session is not None:
                session.tokens += output.new_token_ids
                if output.finish_reason is not None:
                    session.finish_reasons.append(str(output.finish_reason))
    raise AssertionError("the engine does not come to rest")


def play(it: Engine, name: str, pieces: Sequence[Sequence[int]], is_bunched: bool = False, **params: Any) -> Session:
    """A whole session; ``is_bunched``: all pieces are there before the first answer."""
    session = Session(it, name)
    for piece in pieces:
        session.send(piece, greedy(ANSWER, **params))
        if not is_bunched:
            rest(it, session)
    session.end()
    rest(it, session)
    return session


def expected(it: Engine, pieces: Sequence[Sequence[int]], **params: Any) -> list[Result]:
    """A plain cold request per piece."""
    known: list[int] = []
    results = []
    for piece in pieces:
        known += piece
        result = it.generate([known], greedy(ANSWER, **params), cache_salt=f"cold-{len(known)}")[0]
        assert result.cached_tokens == 0
        known += result.tokens[:-1]
        results.append(result)
    return results


def assert_all_returned(it: Engine) -> None:
    it.drain()
    while it.scheduler.has_requests():
        it.step()
    pool = it.scheduler.kv_cache_manager.block_pool
    assert it.scheduler.requests == {} and it.scheduler.num_waiting_for_streaming_input == 0
    assert (it.runner.step.state_slots.num_taken, len(it.runner.step.requests)) == (0, 0)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(params=["q35_dense", "llama"])
def opened(shelf: Any, is_async: bool, request: pytest.FixtureRequest) -> Engine:
    return shelf(request.param, async_scheduling=is_async, enable_prefix_caching=True)


@pytest.mark.parametrize("is_bunched", [False, True], ids=["spaced", "bunched"])
def test_each_piece_is_answered_as_its_whole_prompt(opened: Engine, schedule_of: Callable, is_bunched: bool) -> None:
    pieces = pieces_of(salt=10 * is_bunched)
    cold = expected(opened, pieces)
    steps = schedule_of(opened)
    session = play(opened, f"is-bunched-{is_bunched}", pieces, is_bunched)
    assert session.tokens == [token for result in cold for token in result.tokens]
    assert session.finish_reasons == ["length"] * len(pieces)
    # Without recurrent layers a split prompt may differ in its last bits, as everywhere.
    tolerance = 0.0 if opened.scheduler.has_mamba_layers else 1e-4
    logits = torch.cat([result.logits for result in cold])  # type: ignore[misc]
    torch.testing.assert_close(torch.stack(session.logits), logits, rtol=0, atol=tolerance)
    # Reach: no piece but the first reads its prompt from the beginning.
    assert [n for step in steps for n in step.values() if n > 1] == [20, 36 - 16, 83 - 32, 91 - 80]
    assert_all_returned(opened)


def test_a_session_without_prefix_caching(shelf: Any, is_async: bool) -> None:
    it = shelf("q35_dense", async_scheduling=is_async, enable_prefix_caching=False)
    cold = expected(it, pieces_of(3))
    session = play(it, "uncached", pieces_of(3))
    assert session.tokens == [token for result in cold for token in result.tokens]
    assert torch.equal(torch.stack(session.logits), torch.cat([result.logits for result in cold]))
    assert_all_returned(it)


def test_a_second_session_hits_what_the_first_has_left(opened: Engine, schedule_of: Callable) -> None:
    first = play(opened, "first", pieces_of(5))
    steps = schedule_of(opened)
    second = play(opened, "second", pieces_of(5))
    assert steps[0]["second"] == PIECES[0] - BLOCK
    assert second.tokens == first.tokens
    assert torch.equal(torch.stack(second.logits), torch.stack(first.logits))


def reuse_of_a_dropped_token(it: Engine, salt: int) -> tuple[Result, Result]:
    """A session whose first answer fills a block with the token that vLLM drops; then a prompt that has that token."""
    first = prompt_of(2 * BLOCK - ANSWER, salt)
    session = Session(it, f"dropped-{salt}")
    session.send(first, greedy(ANSWER))
    rest(it, session)
    dropped = session.tokens[-1]
    session.send([dropped % 400 + 20, *prompt_of(20, salt + 1)], greedy(ANSWER))
    rest(it, session)
    session.end()
    rest(it, session)
    prompt = [*first, *session.tokens[: ANSWER - 1], dropped, *prompt_of(9, salt + 2)]
    return it.generate([prompt], greedy(ANSWER))[0], it.generate([prompt], greedy(ANSWER), cache_salt="other")[0]


def test_a_dropped_token_leaves_no_hash(opened: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps the hash of the block that the dropped token has filled, and files the next piece's state under it."""
    hit, cold = reuse_of_a_dropped_token(opened, salt=30)
    assert hit.tokens == cold.tokens
    torch.testing.assert_close(hit.logits, cold.logits, rtol=0, atol=1e-4)

    def as_vllm_does(session: Any, update: Any) -> None:
        Scheduler._update_request_as_session(opened.scheduler, session, update)
        session.num_computed_tokens = 0

    monkeypatch.setattr(opened.scheduler, "_update_request_as_session", as_vllm_does)
    hit, cold = reuse_of_a_dropped_token(opened, salt=40)
    assert hit.cached_tokens == 2 * BLOCK
    assert float((hit.logits - cold.logits).abs().max()) > 1e-2


def test_a_token_that_stops_is_dropped_with_what_followed_it(opened: Engine) -> None:
    """Asynchronous scheduling computes one token more before it hears of the stop."""
    pieces = pieces_of(50)[:2]
    stop = opened.generate([pieces[0]], greedy(ANSWER))[0].tokens[1]
    cold = expected(opened, pieces, stop_token_ids=[stop])
    assert len(cold[0].tokens) == 2
    session = play(opened, "stopped", pieces, stop_token_ids=[stop])
    assert session.tokens == [token for result in cold for token in result.tokens]
    assert session.finish_reasons == [result.finish_reason for result in cold]
    assert_all_returned(opened)


def test_parameters_belong_to_their_piece(opened: Engine) -> None:
    """Maximum, seed and penalties of the second piece are its own."""
    pieces = pieces_of(60)[:2]
    params = [
        SamplingParams(temperature=1.0, seed=7, max_tokens=ANSWER, ignore_eos=True, detokenize=False),
        SamplingParams(temperature=1.0, seed=7, max_tokens=9, ignore_eos=True, detokenize=False, frequency_penalty=1.5),
    ]
    session, known, wanted = Session(opened, "params"), [], []
    for piece, p in zip(pieces, params, strict=True):
        session.send(piece, p)
        rest(opened, session)
        known += piece
        tokens = opened.generate([known], p, cache_salt="cold")[0].tokens
        wanted += tokens
        known += tokens[:-1]
    session.end()
    rest(opened, session)
    assert len(wanted) == ANSWER + 9 and session.tokens == wanted


def test_pieces_longer_than_the_model_end_the_session_alone(opened: Engine) -> None:
    longest = DEFAULTS["max_model_len"]
    other = opened.generate([prompt_of(30)], greedy(9))[0].tokens
    for name, pieces in (("spaced", 3), ("bunched", 3)):
        session = Session(opened, f"too-long-{name}")
        beside = opened.add(prompt_of(30), greedy(9))
        for n in range(pieces):
            session.send(prompt_of(longest // 2 - 5, n), greedy(ANSWER))
            if name == "spaced":
                rest(opened, session)
        rest(opened, session)
        assert session.finish_reasons[-1] == "error" and len(session.finish_reasons) <= pieces
        opened.vllm_engine.output_processor.abort_requests([beside], internal=False)
        assert opened.generate([prompt_of(30)], greedy(9))[0].tokens == other
        assert_all_returned(opened)


def test_paused_sessions_hold_no_slot(opened: Engine) -> None:
    """As many sessions as seats are paused and woken beside plain requests, in an order that would run out of slots."""
    sessions = [Session(opened, f"seat-{n}") for n in range(DEFAULTS["max_num_seqs"])]
    for n, session in enumerate(sessions):
        session.send(prompt_of(20, n), greedy(ANSWER))
    rest(opened, *sessions)
    statuses = {request.status for request in opened.scheduler.requests.values()}
    assert statuses == {RequestStatus.WAITING_FOR_STREAMING_REQ}
    for session in sessions[1::2]:
        session.end()
    plain = [opened.add(prompt_of(40, n), greedy(ANSWER)) for n in range(3)]
    for n, session in enumerate(sessions[::2]):
        session.send(prompt_of(20, n + 50), greedy(ANSWER))
    plain += [opened.add(prompt_of(40, n), greedy(ANSWER)) for n in range(9)]
    rest(opened, *sessions)
    assert [len(session.tokens) for session in sessions] == [2 * ANSWER, ANSWER] * (len(sessions) // 2)
    for session in sessions[::2]:
        session.end()
    rest(opened, *sessions)
    opened.vllm_engine.output_processor.abort_requests(plain, internal=False)
    assert_all_returned(opened)


def test_a_paused_session_is_aborted_and_survives_a_reset(opened: Engine) -> None:
    pieces = pieces_of(70)[:2]
    cold = expected(opened, pieces)
    gone, stays = Session(opened, "gone"), Session(opened, "stays")
    for session in (gone, stays):
        session.send(pieces[0], greedy(ANSWER))
    rest(opened, gone, stays)
    opened.vllm_engine.engine_core.abort_requests(["gone"])
    opened.vllm_engine.reset_prefix_cache(reset_running_requests=True)
    stays.send(pieces[1], greedy(ANSWER))
    rest(opened, stays)
    stays.end()
    rest(opened, stays)
    assert stays.tokens == [token for result in cold for token in result.tokens]
    assert_all_returned(opened)
