# SPDX-License-Identifier: Apache-2.0
"""The nightly run without a Gaudi and without lm-eval: what its workflow names, its variables, GSM8K's task, command
line, floors and comparison, and the tables."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from tools.nightly import gsm8k, process, report, setting
from vllm_gaudi import device

ROOT = Path(__file__).resolve().parents[3]
WORKFLOW = ROOT / ".github" / "workflows" / "nightly-hpu.yml"
MAKEFILE = (ROOT / "Makefile").read_text()

SPECIAL_VARIABLES = {"GITHUB_STEP_SUMMARY"}


# The workflow


def workflow_faults(text: str) -> list[str]:
    """What is wrong with the nightly workflow, against the tree."""
    found = []
    workflow = yaml.safe_load(text)
    (job,) = workflow["jobs"].values()
    runs = [step["run"] for step in job["steps"] if "run" in step]
    script = "\n".join(runs)
    targets = set(re.findall(r"^([a-z0-9]+):", MAKEFILE, re.M))
    found += [f"make has no target {name}" for name in re.findall(r"\bmake ([a-z0-9]+)", script) if name not in targets]
    known = set(re.findall(r"^([A-Z][A-Z0-9_]*) *\?=", MAKEFILE, re.M))
    found += [f"make knows no {name}" for name in re.findall(r"([A-Z][A-Z0-9_]*)=", script) if name not in known]
    named = set(re.findall(r"\btests/[\w/]+\.py", script))
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "e2e" / "hpu").glob("test_*.py")}
    found += [f"names {path}, which is not there" for path in named if not (ROOT / path).exists()]
    found += [f"does not run {path}" for path in there - named]
    hpu_runs = [run for run in runs if "tests/e2e/hpu" in run]
    found += [f"runs none of its tests: {run}" for run in hpu_runs if "MARKERS=hpu" not in run]
    found += [f"runs two files in one process: {run}" for run in hpu_runs if run.count("tests/e2e/hpu") > 1]
    found += [
        f"devices are shared: {run}" for run in runs if re.search(r"make (unit|e2e)", run) and "WORKERS=0" not in run
    ]
    for name, value in job.get("env", {}).items():
        if name not in setting.VARIABLES:
            found.append(f"sets {name}, which nobody reads")
        elif name != "NIGHTLY_REQUIRED" and value != f"${{{{ vars.{name} }}}}":
            found.append(f"{name} does not come from the repository's variable")
    found += [f"does not set {name}" for name in set(setting.VARIABLES) - set(job.get("env", {}))]
    found += [f"uses ${name}" for name in re.findall(r"\$\{?([A-Z]\w+)", script) if name not in SPECIAL_VARIABLES]
    after_the_first = [step for step in job["steps"] if "run" in step][1:]
    found += [f"stops before: {step['run']}" for step in after_the_first if "!cancelled()" not in step.get("if", "")]
    uploads = [step for step in job["steps"] if step.get("uses", "").startswith("actions/upload-artifact@")]
    if len(uploads) != 1 or "!cancelled()" not in uploads[0].get("if", ""):
        found.append("does not upload the tables of a failing night")
    elif setting.OUT.relative_to(ROOT).as_posix() not in uploads[0]["with"]["path"].split():
        found.append("uploads another folder than the tables'")
    if set(job["strategy"]["matrix"]["device"]) != {"gaudi2", "gaudi3"} or job["strategy"]["fail-fast"]:
        found.append("does not try both devices")
    found += [f"names a place outside: {place}" for place in re.findall(r"\w+://\S+|(?<![\w.])/(?:[\w.-]+/)+\S*", text)]
    return found


def test_the_workflow_agrees_with_the_tree():
    assert not workflow_faults(WORKFLOW.read_text())


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("E2E=tests/e2e/hpu/test_state.py", "", "does not run tests/e2e/hpu/test_state.py"),
        ("hpu/test_state.py", "hpu/test_stat.py", "names tests/e2e/hpu/test_stat.py"),
        ("make demo", "make dema", "no target dema"),
        ("MARKERS=hpu E2E=tests/e2e/hpu/test_ttft.py", "E2E=tests/e2e/hpu/test_ttft.py", "runs none of its tests"),
        ("MARKERS=hpu E2E=tests/e2e/hpu/test_ttft.py", "MARKER=hpu E2E=tests/e2e/hpu/test_ttft.py", "knows no MARKER"),
        ("test_ttft.py", "test_ttft.py tests/e2e/hpu/test_poison.py", "two files in one process"),
        ("make unit WORKERS=0", "make unit", "devices are shared"),
        ("NIGHTLY_RANKS: ", "NIGHTLY_RANK: ", "NIGHTLY_RANK, which nobody reads"),
        ("NIGHTLY_GSM8K: ${{ vars.NIGHTLY_GSM8K }}\n", "\n", "does not set NIGHTLY_GSM8K"),
        ("${{ vars.NIGHTLY_MODEL }}", "Qwen", "does not come from the repository's variable"),
        ("          path: |\n            .cache/nightly\n", "          path: |\n", "uploads another folder"),
        ("[gaudi2, gaudi3]", "[gaudi3]", "both devices"),
        ('NIGHTLY_REQUIRED: "1"', 'NIGHTLY_REQUIRED: "/mnt/models/1"', "names a place outside: /mnt/models"),
        (
            "        if: ${{ !cancelled() }}\n        run: make demo",
            "        run: make demo",
            "stops before: make demo",
        ),
    ],
    ids=range(14),
)
def test_a_planted_fault_is_found(old, new, said):
    text = WORKFLOW.read_text()
    assert old in text
    found = workflow_faults(text.replace(old, new))
    assert any(said in fault for fault in found), found


def test_every_file_for_a_device_is_marked_and_may_take_its_time():
    files = sorted((ROOT / "tests" / "e2e" / "hpu").glob("test_*.py"))
    assert len(files) >= 7
    for path in files:
        assert re.search(r"^pytestmark = .*pytest\.mark\.hpu", path.read_text(), re.M), path.name


# Settings


@pytest.fixture
def unset(monkeypatch):
    for name in setting.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(setting.checkpoints, "build", lambda name, dtype, folder: folder / f"{name}-{dtype}")
    return monkeypatch


def test_a_host_has_a_tiny_model_in_fp32(unset):
    unset.setattr(device, "is_hpu", lambda: False)
    it = setting.of_this_machine()
    assert (it.dtype, it.is_device, it.block_size, it.ranks) == ("float32", False, 16, (2,))
    assert it.max_model_len >= 17 * 16 and it.short_len < it.max_model_len


def test_a_gaudi_has_the_model_that_is_named_and_a_tiny_one_otherwise(unset):
    unset.setattr(device, "is_hpu", lambda: True)
    unset.setenv("NIGHTLY_MODEL", "")
    it = setting.of_this_machine()
    assert Path(it.model).name == "next_moe-bfloat16" and it.num_compiles == 5 and it.ranks == (2,)
    assert it.max_model_len >= 17 * 128
    unset.setenv("NIGHTLY_MODEL", "a/checkpoint")
    assert setting.of_this_machine().ranks == (2, 4)
    unset.setenv("NIGHTLY_RANKS", "2")
    unset.setenv("NIGHTLY_COMPILES", "3")
    unset.setenv("NIGHTLY_ENGINE_FLAGS", '{"max_num_seqs": 3}')
    it = setting.of_this_machine()
    assert (it.model, it.block_size, it.num_blocks, it.ranks, it.num_compiles) == ("a/checkpoint", None, None, (2,), 3)
    assert it.engine_flags()["max_num_seqs"] == 3 and it.engine_flags(max_num_seqs=6)["max_num_seqs"] == 6
    assert it.max_model_len >= 17 * 1152


def test_a_setting_survives_the_way_to_another_process(unset):
    it = setting.on_host(flags={"max_num_seqs": 3})
    assert setting.from_json(json.loads(json.dumps(it.to_json()))) == it


def test_a_variable_that_is_not_in_the_table_is_not_read(unset):
    with pytest.raises(KeyError):
        setting.read("NIGHTLY_MODELS")
    for name, doc in setting.VARIABLES.items():
        assert name.startswith("NIGHTLY_") and doc.endswith(".")


def test_a_fresh_compilation_keeps_nothing_outside_its_folder(tmp_path):
    found = process.fresh_caches(tmp_path / "caches")
    assert found["PT_HPU_RECIPE_CACHE_CONFIG"].startswith(str(tmp_path / "caches"))
    assert all(str(tmp_path) in value or value == "0" for value in found.values())


def test_a_table_is_written_for_people_and_for_programs(tmp_path):
    path = report.write(tmp_path / "out", "speed", "How fast", [{"a": 1, "b": 0.123456}, {"a": "x|y", "b": 2.0}])
    assert path.read_text() == "# How fast\n\n| a | b |\n| --- | --- |\n| 1 | 0.1235 |\n| x/y | 2 |\n"
    assert json.loads(path.with_suffix(".json").read_text())["rows"][0] == {"a": 1, "b": 0.123456}


# GSM8K


def test_every_question_follows_the_same_examples():
    """So that there is a prefix to share; lm-eval's default draws other ones for each question."""
    configuration = gsm8k.task("", 16)
    assert configuration["fewshot_config"] == {"sampler": "first_n"} and configuration["num_fewshot"] == 16
    assert configuration["fewshot_split"] != configuration["test_split"]
    assert configuration["generation_kwargs"]["do_sample"] is False


def test_the_data_set_is_the_hubs_or_a_folders(tmp_path):
    assert gsm8k.task("", 1)["dataset_path"] == "openai/gsm8k"
    local = gsm8k.task(str(tmp_path), 1)
    assert local["dataset_path"] == "json" and "dataset_name" not in local
    assert local["dataset_kwargs"]["data_files"] == {s: str(tmp_path / f"{s}.jsonl") for s in ("train", "test")}
    for configuration, offline in ((local, "1"), (gsm8k.task("", 1), "0")):
        gsm8k.write_task(tmp_path / "task", configuration)
        assert yaml.safe_load((tmp_path / "task" / f"{gsm8k.TASK}.yaml").read_text()) == configuration
        assert gsm8k.evaluators_environment(tmp_path / "task")["HF_HUB_OFFLINE"] == offline


def test_our_own_questions_are_in_gsm8ks_form_and_right(tmp_path):
    gsm8k.write_questions(tmp_path, 3, 12)
    (regex,) = [f["regex_pattern"] for f in gsm8k.task("", 1)["filter_list"][0]["filter"] if "regex_pattern" in f]
    for split, count in (("train", 3), ("test", 12)):
        lines = [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        assert len(lines) == count
        for line in lines:
            assert set(line) == {"question", "answer"}
            had, more = map(int, re.findall(r"\d+", line["question"]))
            assert re.search(regex, line["answer"])[1] == str(had + more)


def test_the_command_line(tmp_path):
    words = gsm8k.command(Path("python"), "http://127.0.0.1:1", "name", tmp_path / "task", tmp_path / "out", 7)
    options = dict(zip(words[4::2], words[5::2], strict=False))
    assert words[:4] == ["python", "-m", "lm_eval", "run"] and words[-1] == "--log_samples"
    about = dict(pair.split("=") for pair in options["--model_args"].split(","))
    assert about["base_url"] == "http://127.0.0.1:1/v1/completions" and about["tokenizer_backend"] == "None"
    assert (options["--tasks"], options["--limit"], options["--include_path"]) == (
        gsm8k.TASK,
        "7",
        str(tmp_path / "task"),
    )


@pytest.mark.parametrize(
    ("is_caching", "flag"), [(True, "--enable-prefix-caching"), (False, "--no-enable-prefix-caching")]
)
def test_the_servers_differ_in_caching_alone(is_caching, flag):
    words = gsm8k.serve_command("model", 1, ["--dtype", "float32"], is_caching)
    other = gsm8k.serve_command("model", 1, ["--dtype", "float32"], not is_caching)
    assert flag in words and flag not in other
    assert [word for word in words if "prefix-caching" not in word] == [w for w in other if "prefix-caching" not in w]


def write_run(out, score, answers):
    """The two files of a run, as lm-eval lays them out."""
    folder = out / gsm8k.TASK
    folder.mkdir(parents=True)
    scores = {"alias": gsm8k.TASK, gsm8k.SCORE: score}
    (folder / "results_2026-01-01T00-00-00.json").write_text(json.dumps({"results": {gsm8k.TASK: scores}}))
    lines = [json.dumps({"doc_id": n, "resps": [[text]]}) for n, text in enumerate(answers)]
    (folder / f"samples_{gsm8k.TASK}_2026-01-01T00-00-00.jsonl").write_text("\n".join(lines) + "\n")


def test_a_run_is_read_and_two_runs_in_one_folder_are_refused(tmp_path):
    write_run(tmp_path / "one", 0.75, ["a", "b"])
    found = gsm8k.read_answers(tmp_path / "one", 5, 9)
    assert found == gsm8k.Answers(0.75, {"0": "a", "1": "b"}, 5, 9)
    write_run(tmp_path / "one" / "again", 0.75, ["a"])
    for folder in ("one", "none"):
        with pytest.raises(RuntimeError, match="not one of each"):
            gsm8k.read_answers(tmp_path / folder, 5, 9)


GATE = gsm8k.Gate("model", "", floor=0.9, apart=0.03)
ON = gsm8k.Answers(0.95, {"0": "a", "1": "b"}, hits=100, prompts=200)
OFF = gsm8k.Answers(0.94, {"0": "a", "1": "c"}, hits=0, prompts=200)


def test_scores_above_the_floor_and_near_each_other_pass():
    gsm8k.check(GATE, ON, OFF, is_exact=False)
    gsm8k.check(GATE, ON, dataclasses.replace(OFF, texts=ON.texts), is_exact=True)


@pytest.mark.parametrize(
    ("on", "off", "is_exact", "said"),
    [
        ({"score": 0.899}, {"score": 0.91}, False, r"caching on: 0\.899, floor 0\.900"),
        ({"score": 0.91}, {"score": 0.899}, False, r"caching off: 0\.899, floor 0\.900"),
        ({"score": 0.98}, {"score": 0.94}, False, "moves the score by 0.040"),
        ({"hits": 0}, {}, False, "no token of 200 came out of the cache"),
        ({}, {"hits": 5}, False, "5 tokens came out of a cache that was off"),
        ({"texts": {"0": "a"}}, {}, False, "not answered the same questions"),
        ({"texts": {}}, {"texts": {}}, False, "not answered the same questions"),
        ({}, {}, True, "changes the answers to questions 1"),
    ],
    ids=range(8),
)
def test_a_gate_that_does_not_hold_fails(on, off, is_exact, said):
    with pytest.raises(AssertionError, match=said):
        gsm8k.check(GATE, dataclasses.replace(ON, **on), dataclasses.replace(OFF, **off), is_exact)


def test_both_models_have_a_floor_and_a_variable_of_the_table():
    floors = {gate.name: gate.floor for gate in gsm8k.GATES}
    assert floors["Qwen3.5-35B-A3B"] == 0.90 and floors["Qwen3.6-27B"] >= 0.85
    assert all(gate.variable in setting.VARIABLES and gate.apart <= 0.05 for gate in gsm8k.GATES)


def test_what_scores_answers_is_pinned_with_a_reason_and_is_not_installed_with_the_tests():
    (line,) = [text for text in gsm8k.PINS.read_text().splitlines() if text and not text.startswith("#")]
    assert re.fullmatch(r"lm-eval\[api\]==[\d.]+ +# .+", line)
    assert not any(
        "lm-eval" in path.read_text() for path in (ROOT / "requirements").glob("*.txt") if path != gsm8k.PINS
    )
