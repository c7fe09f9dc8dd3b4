# SPDX-License-Identifier: Apache-2.0
"""The execution mode: what device, --enforce-eager and variables make of it, and that nobody else asks for them."""

from __future__ import annotations

import dataclasses

import pytest

from vllm_gaudi import device
from vllm_gaudi.bucketing.grid import RowTiles
from vllm_gaudi.v1.worker import execution

VARIABLES = (
    "VLLM_GAUDI_COMPILE",
    "VLLM_GAUDI_ROW_TILES",
    "VLLM_GAUDI_EXECUTION_MODE",
    "VLLM_GAUDI_POISON",
    "VLLM_SKIP_WARMUP",
)


@pytest.fixture
def choose(monkeypatch):
    """``choose(on_hpu, enforce_eager, **variables)``: the mode where nothing else is set."""

    def chosen(on_hpu=False, enforce_eager=False, **variables):
        monkeypatch.setattr(device, "is_hpu", lambda: on_hpu)
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(f"VLLM_GAUDI_{name}" if name != "VLLM_SKIP_WARMUP" else name, value)
        return execution.choose(enforce_eager)

    return chosen


def test_a_host_without_a_wish_runs_exact_shapes_with_packed_weights_and_hints(choose):
    mode = choose()
    assert (mode.name, mode.on_hpu, mode.backend) == ("host", False, None)
    assert mode.row_tiles == mode.expert_row_tiles == RowTiles(64, 16, short_tile=16)
    assert (mode.exact_shapes, mode.host_hints, mode.packed_rows, mode.logits_row_tile) == (True, True, 16, 16)
    assert mode.warm_up and not mode.poison


def test_a_gaudi_compiles_and_runs_every_product_over_all_rows(choose):
    mode = choose(on_hpu=True)
    assert (mode.name, mode.on_hpu, mode.backend) == ("hpu", True, "hpu_backend")
    assert mode.row_tiles is mode.expert_row_tiles is None
    assert (mode.exact_shapes, mode.host_hints, mode.packed_rows, mode.logits_row_tile) == (False, False, 0, 0)


def test_a_host_may_run_as_a_gaudi_does(choose):
    mode = choose(EXECUTION_MODE="hpu_like")
    assert (mode.name, mode.on_hpu, mode.backend) == ("hpu_like", False, None)
    assert mode.row_tiles == mode.expert_row_tiles == RowTiles(64, 16)
    assert (mode.exact_shapes, mode.host_hints, mode.packed_rows, mode.logits_row_tile) == (False, False, 0, 16)


@pytest.mark.parametrize(
    ("wish", "name", "backend"),
    [
        ({"COMPILE": "aot_eager"}, "hpu_like", "aot_eager"),
        ({"COMPILE": "aot_eager", "enforce_eager": True}, "host", None),
        ({"COMPILE": "none"}, "host", None),
        ({"ROW_TILES": "0"}, "hpu_like", None),
        ({"on_hpu": True, "COMPILE": "none"}, "hpu", None),
        ({"on_hpu": True, "COMPILE": "inductor"}, "hpu", "inductor"),
        ({"on_hpu": True, "enforce_eager": True}, "hpu", None),
        ({"on_hpu": True, "EXECUTION_MODE": "host"}, "hpu", "hpu_backend"),
    ],
)
def test_exact_shapes_are_for_a_host_that_compiles_nothing_and_has_tiles(choose, wish, name, backend):
    mode = choose(**wish)
    assert (mode.name, mode.backend, mode.exact_shapes) == (name, backend, name == "host")


def test_row_tiles_on_a_gaudi_are_not_the_experts(choose):
    mode = choose(on_hpu=True, ROW_TILES="1")
    assert mode.row_tiles == RowTiles(64, 16) and mode.expert_row_tiles is None and mode.logits_row_tile == 16


def test_switches_of_tests_and_warm_up_are_in_the_record(choose):
    mode = choose(POISON="1", VLLM_SKIP_WARMUP="1")
    assert mode.poison and not mode.warm_up


def test_a_bad_wish_is_an_error_that_names_the_variable(choose):
    with pytest.raises(ValueError, match="VLLM_GAUDI_EXECUTION_MODE='gpu' is not known; use one of host, hpu_like"):
        choose(EXECUTION_MODE="gpu")


def test_the_record_is_frozen_and_says_what_it_is_in_one_line(choose):
    mode = choose()
    with pytest.raises(dataclasses.FrozenInstanceError):
        mode.backend = "inductor"
    assert mode.describe() == (
        "Execution mode host: eager, exact shapes, products in tiles of 64 rows (prefill) and 16 (decode), decode "
        "weights packed"
    )
    assert choose(on_hpu=True).describe() == (
        "Execution mode hpu: layers compiled by hpu_backend, bucketed shapes, one product over all rows"
    )
