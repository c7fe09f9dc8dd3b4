# SPDX-License-Identifier: Apache-2.0
"""The recorder's rules, each by a call that keeps it and one that breaks it; and the table's own order."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from tests.support.operator_recorder import PHASES, OperatorRecorder, _Operators, _Reads
from tests.support.operator_rules import AFTER, BEFORE
from tests.support.operator_table import EXEMPTIONS, OPERATORS, Exceptions, documentation

CACHE = torch.zeros(8, 4)


@pytest.fixture
def seen() -> OperatorRecorder:
    caches = SimpleNamespace(k=[CACHE], v=[], conv_states=[], ssm_states=[])
    runner = SimpleNamespace(step=SimpleNamespace(caches=caches), model=torch.nn.Linear(2, 2))
    return OperatorRecorder(runner, Exceptions(int64_moves=frozenset({"view"})))


def rules(seen: OperatorRecorder, run, phase: str = "decode", inside: bool = False) -> set[str]:
    """The rules that ``run`` breaks. A CPU also raises on an index out of range."""
    region = seen.region() if inside else contextlib.nullcontext()
    with contextlib.suppress(IndexError), _Reads(seen), _Operators(seen), seen.phase(phase), region:
        run()
    return {violation.rule for violation in seen.record.violations}


FLOATS, MASK = torch.rand(6), torch.tensor([True, False] * 3)
INTS = torch.tensor([1, 2], dtype=torch.int32)
LONGS = torch.tensor([1, 2])

SHAPE = "the shape depends on data"
WAIT = "the host waits for the device"
CALLS = {
    "nonzero": (lambda: MASK.nonzero(), SHAPE),
    "boolean index": (lambda: FLOATS[MASK], SHAPE),
    "boolean store": (lambda: FLOATS.clone().index_put_((MASK,), torch.zeros(3)), SHAPE),
    "masked_select": (lambda: FLOATS.masked_select(MASK), SHAPE),
    "unique": (lambda: INTS.unique(), SHAPE),
    "item": (lambda: FLOATS[0].item(), WAIT),
    "truth": (lambda: bool(MASK[0]), WAIT),
    "list": (lambda: FLOATS.tolist(), WAIT),
    "numpy": (lambda: FLOATS.numpy(), WAIT),
    "to the host": (lambda: FLOATS.to("cpu"), WAIT),
    "double": (lambda: FLOATS.double() * 2, "float64 or complex numbers"),
    "long sum": (lambda: LONGS + 1, "int64 arithmetic"),
    "negative index": (lambda: FLOATS.index_select(0, INTS - 2), "an index is negative or too large"),
    "large index": (lambda: FLOATS[INTS + 5], "an index is negative or too large"),
    "embedding": (lambda: torch.embedding(CACHE, LONGS * 5), "an index is negative or too large"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_breaks_a_rule_is_found(seen, name):
    call, rule = CALLS[name]
    assert rule in rules(seen, call)


KEPT = {
    "select by mask": lambda: torch.where(MASK, FLOATS, 0.0),
    "int32 sum": lambda: INTS + 1,
    "int64 index": lambda: FLOATS.index_select(0, LONGS),
    "int64 view": lambda: LONGS.view(2, 1),
    "upload": lambda: FLOATS.to("cpu", non_blocking=True),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_call_that_keeps_them_is_not(seen, name):
    assert rules(seen, KEPT[name]) == set()


WRITE = "a write through a view in a compiled region"
IN_GRAPH = {
    "write through a view": (lambda: CACHE.view(-1).index_copy_(0, LONGS, torch.ones(2)), WRITE),
    "write through a slice": (lambda: CACHE[:2].zero_(), WRITE),
    "view of another dtype": (lambda: CACHE.view(torch.int32), "a view of another dtype in a compiled region"),
    "selection": (lambda: torch.where(MASK[:2], INTS, INTS), "integers are selected in a compiled region"),
}


@pytest.mark.parametrize("name", IN_GRAPH)
def test_a_call_that_breaks_a_rule_of_graphs_is_found_inside_one_only(seen, name):
    call, rule = IN_GRAPH[name]
    assert rule not in rules(seen, call)
    assert rule in rules(seen, call, inside=True)


KEPT_IN_GRAPH = {
    "write": lambda: CACHE.index_copy_(0, LONGS, torch.ones(2, 4)),
    "write into a temporary": lambda: torch.zeros(8, 4).view(-1).index_copy_(0, LONGS, torch.ones(2)),
}


@pytest.mark.parametrize("name", KEPT_IN_GRAPH)
def test_a_graph_may_write_the_tensor_itself(seen, name):
    assert WRITE not in rules(seen, KEPT_IN_GRAPH[name], inside=True)


def test_every_rule_is_broken_by_a_call_of_these_tables():
    assert {rule for _, rule in (*CALLS.values(), *IN_GRAPH.values())} == {*BEFORE, *AFTER}


def test_what_belongs_to_no_phase_is_not_recorded(seen):
    with _Reads(seen), _Operators(seen):
        assert FLOATS.tolist() and seen.now is None
    assert not seen.record.operators and not seen.record.violations


def test_a_composite_is_recorded_as_what_it_is_made_of(seen):
    rules(seen, lambda: torch.nn.functional.linear(torch.ones(3, 2), torch.ones(4, 2)))
    assert {"aten.t.default", "aten.mm.default"} <= set(seen.record.operators)
    assert "aten.linear.default" not in seen.record.operators


def test_rows_of_the_table_are_in_order_and_speak_of_known_phases():
    assert list(OPERATORS) == sorted(OPERATORS)
    for name, row in OPERATORS.items():
        assert row.why and row.phases and set(row.phases.split()) <= set(PHASES), name
        assert row.path in ("", "host", "gaudi"), name
    assert all(set(phases.split()) <= set(PHASES) for phases, _ in EXEMPTIONS.int64.values())
    assert all(name in documentation() for name in OPERATORS)
