# SPDX-License-Identifier: Apache-2.0
"""`vllm-gaudi plan` on the published models' dimensions, against literal numbers; its words, its JSON and its errors.

The files in configs/ are written by hand (each says so). That the numbers are a started engine's is test_plan's.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import with_stub
from tools.docs import sizes
from tools.install import ROOT
from tools.model_sizes import Geometry, Model
from vllm_gaudi import cli, device

CONFIGS = Path(__file__).parent / "configs"
MIB = 2**20
NEXT_FP32 = ("--mamba-ssm-cache-dtype", "float32")


@dataclass(frozen=True)
class Row:
    """Bytes of one rank; ``row`` and ``block`` in MiB to one decimal."""

    name: str
    ranks: int
    conv: int
    ssm: int
    block_size: int
    page: int
    factor: float
    row: float
    block: float
    flags: tuple[str, ...] = ()
    model: Model = sizes.QWEN35_27B

    @property
    def id(self) -> str:
        return f"{self.name}-{self.ranks}{'-fp32' if self.flags else ''}"


TABLE = (
    Row("qwen3.5-27b", 1, 61440, 3145728, 896, 3670016, 0.5337, 146.8, 56.0),
    Row("qwen3.5-27b", 2, 30720, 1572864, 896, 1835008, 0.5337, 73.4, 28.0),
    Row("qwen3.5-27b", 4, 15360, 786432, 896, 917504, 0.5337, 36.7, 14.0),
    Row("qwen3.5-27b", 8, 7680, 393216, 512, 524288, 0.5667, 18.4, 8.0),
    Row("qwen3.5-35b-a3b", 1, 49152, 2097152, 1152, 2359296, 0.5236, 61.4, 22.5, model=sizes.QWEN35_35B),
    Row("qwen3.5-35b-a3b", 2, 24576, 1048576, 1152, 1179648, 0.5236, 30.7, 11.2, model=sizes.QWEN35_35B),
    Row("qwen3.5-35b-a3b", 4, 12288, 524288, 640, 655360, 0.5498, 15.4, 6.2, model=sizes.QWEN35_35B),
    Row("qwen3.5-35b-a3b", 8, 6144, 262144, 384, 393216, 0.5944, 7.7, 3.8, model=sizes.QWEN35_35B),
    Row("qwen3.5-122b-a10b", 4, 18432, 1048576, 1152, 1179648, 0.5251, 36.6, 13.5, model=sizes.QWEN35_122B),
    Row("qwen3.5-122b-a10b", 8, 9216, 524288, 640, 655360, 0.5512, 18.3, 7.5, model=sizes.QWEN35_122B),
    Row("qwen3.5-397b-a17b", 1, 73728, 4194304, 2176, 4456448, 0.5108, 183.2, 63.8, model=sizes.QWEN35_397B),
    Row("qwen3.5-397b-a17b", 4, 18432, 1048576, 1152, 1179648, 0.5251, 45.8, 16.9, model=sizes.QWEN35_397B),
    Row("qwen3.5-397b-a17b", 8, 9216, 524288, 640, 655360, 0.5512, 22.9, 9.4, model=sizes.QWEN35_397B),
    Row("qwen3-next-80b-a3b", 1, 49152, 1048576, 640, 1310720, 0.5442, 37.7, 15.0, model=sizes.QWEN3_NEXT_BF16),
    Row("qwen3-next-80b-a3b", 4, 12288, 262144, 384, 393216, 0.5890, 9.4, 4.5, model=sizes.QWEN3_NEXT_BF16),
    Row("qwen3-next-80b-a3b", 1, 49152, 2097152, 1152, 2359296, 0.5236, 73.7, 27.0, NEXT_FP32, sizes.QWEN3_NEXT),
)

PACKING = (
    # config, ranks, heads in the K half, heads in all, token rows of the V half that are used, bytes of a token row
    ("qwen3.5-27b", 1, 28, 48, 670, 2048),
    ("qwen3.5-27b", 2, 14, 24, 670, 1024),
    ("qwen3.5-27b", 4, 7, 12, 670, 512),
    ("qwen3.5-27b", 8, 4, 6, 271, 512),
    ("qwen3.5-35b-a3b", 1, 18, 32, 944, 1024),
    ("qwen3.5-35b-a3b", 4, 5, 8, 408, 512),
    ("qwen3.5-397b-a17b", 8, 5, 8, 402, 512),
    ("qwen3.5-397b-a17b", 4, 9, 16, 932, 512),
)


CACHE: dict[tuple[str, ...], str] = {}


@pytest.fixture
def plan(run: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """``plan(name, *flags)``: the JSON of a plan of one of the configs, with a device that is large enough."""

    def call(name: str, *flags: object) -> dict[str, Any]:
        key = (name, *map(str, flags))
        if key not in CACHE:
            CACHE[key] = run("plan", CONFIGS / f"{name}.json", "--max-model-len", 32768, "--json", *flags)[1]
        return json.loads(CACHE[key])

    return call


LARGE = ("--language-model-only", "--max-num-seqs", 32, "--max-num-batched-tokens", 8192)
# A pool's blocks are objects in a dry run, too: no more memory than the weights of a rank leave room in.
GIB_OF_LARGEST = {("qwen3.5-397b-a17b", 1): 1024, ("qwen3.5-397b-a17b", 4): 320}
PLANNED = (
    "qwen3.5-27b-1",
    "qwen3.5-27b-8",
    "qwen3.5-35b-a3b-1",
    "qwen3.5-122b-a10b-8",
    "qwen3.5-397b-a17b-8",
    "qwen3-next-80b-a3b-4",
    "qwen3-next-80b-a3b-1-fp32",
)
"""What ``make test`` plans: each model, most ranks. Of the other rows it has the formula; ``make soak`` plans them."""


def large(name: str, ranks: int) -> tuple[object, ...]:
    """Flags of a plan that fits."""
    return "--tp", ranks, "--memory", GIB_OF_LARGEST.get((name, ranks), 256), *LARGE


def share_of_plans(rows: Iterable[Any], id_of: Callable[[Any], str]) -> list[Any]:
    return [pytest.param(row, id=id_of(row), marks=() if id_of(row) in PLANNED else pytest.mark.soak) for row in rows]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.id)
def test_the_formula_of_the_documentation_gives_the_published_numbers(row):
    formula = Geometry(row.model, row.ranks)
    assert formula.state.num_bytes == row.conv + row.ssm
    assert (formula.block, formula.page_bytes) == (row.block_size, row.page)
    assert formula.factor == pytest.approx(row.factor, abs=5e-5)
    assert (formula.row_bytes / MIB, formula.block_bytes / MIB) == (
        pytest.approx(row.row, abs=0.051),
        pytest.approx(row.block, abs=0.051),
    )


@pytest.mark.parametrize("row", share_of_plans(TABLE, lambda row: row.id))
def test_the_numbers_are_the_published_ones(row, plan):
    numbers = plan(row.name, *large(row.name, row.ranks), *row.flags)["numbers"]
    block, state = numbers["block"], numbers["state"]
    assert (state["conv_bytes"], state["ssm_bytes"]) == (row.conv, row.ssm)
    assert state["layer_bytes"] == row.conv + row.ssm
    assert (block["tokens"], block["page_bytes"]) == (row.block_size, row.page)
    assert state["per_block_layout_factor"] == pytest.approx(row.factor, abs=5e-5)
    assert state["row_bytes"] / MIB == pytest.approx(row.row, abs=0.051)
    assert block["block_bytes"] / MIB == pytest.approx(row.block, abs=0.051)
    assert state["whole_heads"] is True
    assert numbers["boundary"]["blocks"] == 4
    assert numbers["boundary"]["moved_bytes"] == state["row_bytes"]
    assert block["gdn_groups"] == [block["attention_layers"]] * 3
    # The documentation's tables come from a formula; a dry run has never seen it.
    formula = Geometry(row.model, row.ranks)
    assert (formula.block, formula.page_bytes) == (block["tokens"], block["page_bytes"])
    assert (formula.block_bytes, formula.row_bytes) == (block["block_bytes"], state["row_bytes"])
    assert formula.factor == state["per_block_layout_factor"]
    assert formula.staging_rows() == numbers["memory"]["staging_rows"]
    assert formula.state_bytes() == numbers["memory"]["states"]
    assert formula.weight_bytes == pytest.approx(numbers["memory"]["weights"], rel=0.03)


def test_the_three_block_sizes_and_the_factor_that_everybody_quotes(plan):
    quoted = [("qwen3.5-27b", 1, 896), ("qwen3.5-35b-a3b", 1, 1152), ("qwen3.5-397b-a17b", 8, 640)]
    found = {name: plan(name, *large(name, ranks))["numbers"] for name, ranks, _ in quoted}
    assert [found[name]["block"]["tokens"] for name, _, _ in quoted] == [896, 1152, 640]
    assert f"{found['qwen3.5-27b']['state']['per_block_layout_factor']:.2f}" == "0.53"


@pytest.mark.parametrize("row", share_of_plans(PACKING, lambda row: f"{row[0]}-{row[1]}"))
def test_heads_are_packed_as_published(row, plan):
    name, ranks, in_k, heads, rows, row_bytes = row
    state = plan(name, *large(name, ranks))["numbers"]["state"]
    k, *v = state["segments"]
    head_words = state["ssm_bytes"] // heads // 4
    assert (k["half"], k["state"], k["num_words"]) == ("k", "ssm", in_k * head_words)
    assert [(part["half"], part["state"]) for part in v] == [("v", "ssm"), ("v", "conv")]
    assert v[0]["num_words"] == (heads - in_k) * head_words
    assert sum(part["num_words"] for part in v) * 4 == rows * row_bytes


# What is told


def numbers_of(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for part in value.values():
            yield from numbers_of(part)
    elif isinstance(value, list):
        for part in value:
            yield from numbers_of(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def test_the_words_have_the_numbers_of_the_json(run):
    arguments = ("plan", CONFIGS / "qwen3.5-27b.json", "--max-model-len", 32768, *large("qwen3.5-27b", 4))
    code, text, _ = run(*arguments)
    assert code == 0
    found = json.loads(run(*arguments, "--json")[1])["numbers"]
    said = set(re.findall(r"[\d,]+\.?\d*", text))
    fits = found["max_concurrency"]
    unsaid = {f"{value:,}" for value in numbers_of(found) if isinstance(value, int)} - {s.rstrip(",.") for s in said}
    assert not unsaid
    assert f"{found['state']['per_block_layout_factor']:.4f}" in said
    for fit in (fits["caching_on"], fits["caching_off"]):
        assert f"{fit['number']:,.2f}x in {fit['blocks']:,} blocks" in text
    assert "estimate" in text


def test_caching_costs_staging_rows_and_a_request_its_checkpoint(plan):
    fits = plan("qwen3.5-27b", "--language-model-only", "--max-num-seqs", 200)["numbers"]["max_concurrency"]
    on, off = fits["caching_on"], fits["caching_off"]
    blocks_each = -(-32768 // 896)
    assert on["in_pool"] == pytest.approx((on["blocks"] - 1) / (blocks_each + 3))
    assert off["in_pool"] == pytest.approx((off["blocks"] - 1) / blocks_each)
    assert 0 < off["blocks"] - on["blocks"] < 32


def test_the_other_way_round_is_told_where_caching_is_off(plan):
    numbers = plan("qwen3.5-27b", "--language-model-only", "--no-enable-prefix-caching")["numbers"]
    mirror = plan("qwen3.5-27b", "--language-model-only")["numbers"]
    assert numbers["max_concurrency"] == mirror["max_concurrency"]
    assert numbers["boundary"] is None and numbers["memory"]["staging_rows"] == 0
    assert mirror["boundary"] is not None and mirror["memory"]["staging_rows"] > 0


def test_the_assumed_card_is_said_and_another_one_is_taken(plan):
    assumed = plan("qwen3.5-27b", "--language-model-only")["numbers"]["memory"]
    given = plan("qwen3.5-27b", "--language-model-only", "--memory", 96, "--peak", 2)["numbers"]["memory"]
    assert (assumed["device"], assumed["is_assumed"], assumed["peak"]) == (128 * 10**9, True, 0)
    assert (given["device"], given["is_assumed"], given["peak"]) == (96 * 2**30, False, 2 * 2**30)
    assert given["available"] == int(96 * 2**30 * 0.92) - sum(
        given[key] for key in ("weights", "peak", "states", "spare")
    )


def test_no_device_is_asked_for_its_memory(monkeypatch, run):
    def asked(*arguments: object) -> int:
        raise AssertionError("a plan is made without a device")

    for name in ("total_memory", "used_memory", "taken_memory", "PeakMemory"):
        monkeypatch.setattr(device, name, asked)
    assert run("plan", CONFIGS / "qwen3.5-27b.json", "--memory", 128, *LARGE)[0] == 0


def test_the_example_of_the_documentation_is_what_the_command_prints(tmp_path, monkeypatch, run):
    page = (ROOT / "docs" / "cli.md").read_text()
    (command,) = re.findall(r"^vllm-gaudi (plan .*)$", page, re.M)
    (example,) = re.findall(r"<!-- example: plan -->\n```text\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / command.split()[1]
    directory.mkdir()
    (directory / "config.json").write_text((CONFIGS / "qwen3.5-27b.json").read_text())
    assert run(*command.split())[:2] == (0, example)


# Refusals and advice


def test_a_multimodal_model_is_refused_and_planned_as_its_text_part(run, plan):
    found = plan("qwen3.5-27b")
    assert [refusal["name"] for refusal in found["refusals"]] == ["multimodal-inputs"]
    assert "--language-model-only" in found["command"].split()
    assert found["numbers"] == plan("qwen3.5-27b", "--language-model-only")["numbers"]
    code, text, _ = run("plan", CONFIGS / "qwen3.5-27b.json")
    assert code == 1 and "refused" in text and "add --language-model-only" in text


def test_every_refusal_is_told_at_once_and_the_command_is_mended(plan):
    found = plan("qwen3.5-27b", "--kv-cache-dtype", "fp8", "--dtype", "float16", "--enable-prefix-caching")
    assert [refusal["name"] for refusal in found["refusals"]] == ["multimodal-inputs", "dtype", "kv-cache-dtype"]
    command = found["command"].split()
    assert "--kv-cache-dtype" not in command and "float16" not in command
    assert command[command.index("--dtype") + 1] == "bfloat16"
    assert {"--enable-prefix-caching", "--language-model-only"} <= set(command)
    assert found["numbers"]["block"]["tokens"] == 896


def test_what_has_no_repair_gives_no_numbers(run):
    code, out, _ = run("plan", CONFIGS / "qwen3-next-80b-a3b.json", "--enable-lora", "--json")
    found = json.loads(out)
    assert code == 1 and found["numbers"] is None
    assert [refusal["name"] for refusal in found["refusals"]] == ["lora"]


def test_vllms_own_refusal_is_one_sentence(plan):
    (refusal,) = plan("qwen3.5-27b", "--language-model-only", "--tp", 5)["refusals"]
    assert refusal["name"] == "start" and "(24) must be divisible by tensor parallel size (5)" in refusal["sentence"]
    assert "\n" not in refusal["sentence"] and "validation error" not in refusal["sentence"]


def test_what_does_not_fit_names_the_fewest_ranks_that_do(plan):
    found = plan("qwen3-next-80b-a3b", "--max-num-seqs", 32)
    (refusal,) = found["refusals"]
    assert refusal["sentence"].startswith("no memory is left for the block pool")
    numbers = found["numbers"]
    assert numbers["pool"] is None and numbers["memory"]["available"] < 0 and numbers["block"]["tokens"] == 640
    assert numbers["max_concurrency"]["caching_on"] is None
    assert "--tensor-parallel-size 2" in found["command"]
    advised = {tuple(advice["flags"]): advice["why"] for advice in found["advice"]}
    assert "B is 1,152 with it" in advised["--mamba-ssm-cache-dtype", "float32"]
    assert plan("qwen3-next-80b-a3b", "--max-num-seqs", 32, "--tp", 2, *NEXT_FP32)["refusals"] == []


def test_slots_that_take_the_pools_memory_are_named(plan):
    many = plan("qwen3.5-27b", "--language-model-only", "--memory", 96)
    few = plan("qwen3.5-27b", "--language-model-only", "--memory", 96, "--max-num-seqs", 8)
    (note,) = many["notes"]
    assert note.startswith("a slot takes 146.81 MiB, used or not: --max-num-seqs 256 takes 36.70 GiB")
    assert many["refusals"] and not few["refusals"] and not few["notes"]


def test_a_length_that_does_not_fit_is_vllms_refusal(plan):
    found = plan("qwen3.5-27b", "--language-model-only", "--memory", 64, "--max-model-len", 200000, "--max-num-seqs", 8)
    (refusal,) = found["refusals"]
    assert "200000" in refusal["sentence"] and "KV cache" in refusal["sentence"]
    assert found["numbers"]["memory"]["available"] > 0 and found["numbers"]["pool"] is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--max-num-batched-tokens", 100, "--max-num-seqs", 64), "--max-num-batched-tokens 128"),
        (("--block-size", 144), "there --block-size 144 is refused"),
        (("--max-model-len", 896), "no prompt can hit"),
    ],
)
def test_what_costs_hits_or_time_is_advised(flags, said, run):
    code, text, _ = run("plan", CONFIGS / "qwen3.5-27b.json", "--language-model-only", *flags)
    assert code == 0 and said in text


# Inputs


def test_a_directory_and_its_file_give_the_same_plan_and_nothing_else_is_needed(tmp_path, run):
    (tmp_path / "config.json").write_text((CONFIGS / "qwen3.5-27b.json").read_text())
    found = []
    for path in (tmp_path, tmp_path / "config.json"):
        code, out, _ = run("plan", path, "--language-model-only", "--max-model-len", 32768, "--json")
        assert code == 0
        found.append(json.loads(out))
    assert found[0]["numbers"] == found[1]["numbers"]
    assert found[0]["command"] == found[1]["command"]
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no file or directory"),
        ("", "is not JSON"),
        ("[]", "names no model_type"),
        ('{"hidden_size": 3}', "names no model_type"),
    ],
)
def test_a_path_that_is_no_model_is_a_sentence(content, said, tmp_path, run):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    code, out, err = run("plan", path)
    assert (code, out) == (2, "")
    assert said in err and err.startswith("vllm-gaudi plan: ") and err.count("\n") == 1


def test_a_directory_without_a_config_is_a_sentence(tmp_path, run):
    code, out, err = run("plan", tmp_path)
    assert (code, out) == (2, "") and "has no config.json" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "content", ['{"model_type": "no_such_model"}', '{"model_type": "qwen3_next", "architectures": ["Nobody"]}']
)
def test_a_config_that_vllm_cannot_use_is_a_refusal(content, tmp_path, run):
    (tmp_path / "config.json").write_text(content)
    code, out, _ = run("plan", tmp_path)
    assert code == 1 and "refused" in out and "Traceback" not in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tp", 0), "is not a positive whole number"),
        (("--memory", "lots"), "is not a number of GiB"),
        (("--memory", 0), "is not a positive number"),
        (("--no-such-flag", 3), "--no-such-flag"),
        (("--max-model-len", "long"), "max-model-len"),
    ],
)
def test_a_wrong_flag_ends_with_its_name(flags, said, run):
    code, out, err = run("plan", CONFIGS / "qwen3.5-27b.json", *flags)
    assert (code, out) == (2, "") and said in err.splitlines()[-1]


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["why", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys, vllm_gaudi.cli as c\n"
        "try: c.main(sys.argv[1:])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "assert not {'torch', 'vllm', 'numpy', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: vllm-gaudi" in done.stdout


def test_only_the_answer_is_printed(tmp_path):
    """In a process of its own, where the command imports vLLM and nothing was set before: an error that vLLM logs."""
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    kept = {name: value for name, value in with_stub.environment(False).items() if name not in cli.QUIET}
    done = with_stub.fork(("-m", "vllm_gaudi.cli", "plan", str(tmp_path), "--json"), kept)
    (refusal,) = json.loads(done.stdout)["refusals"]
    assert "no_such_model" in refusal["sentence"] and "\n" not in refusal["sentence"]
    assert (done.returncode, done.stderr) == (1, "")
