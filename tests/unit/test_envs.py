# SPDX-License-Identifier: Apache-2.0
"""Environment variables: parsed when asked for, defaults where unset, junk refused by name, never overwritten."""

from __future__ import annotations

import os

import pytest

from vllm_gaudi import envs

FLAGS = [name for name, var in envs.TABLE.items() if var.parse is envs._flag]


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in envs.TABLE:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", envs.TABLE)
def test_an_unset_variable_has_its_default(name):
    assert envs.get(name) == envs.TABLE[name].default


@pytest.mark.parametrize("name", envs.TABLE)
def test_every_variable_is_documented_by_a_sentence(name):
    assert envs.TABLE[name].doc.endswith(".")
    assert len(envs.TABLE[name].doc) > 20


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", True),
        ("true", True),
        ("YES", True),
        (" on ", True),
        ("0", False),
        ("False", False),
        ("off", False),
        ("", False),
    ],
)
def test_switches(monkeypatch, name, text, value):
    monkeypatch.setenv(name, text)
    assert envs.get(name) is value


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("text", ["2", "-1", "ja", "1.0", "none"])
def test_a_switch_that_is_none_is_refused_with_name_value_and_legal_values(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=rf"{name}='{text}' .*1, true, 0, false"):
        envs.get(name)


@pytest.mark.parametrize(("text", "value"), [("4", 4.0), ("0.5", 0.5), (" 12 ", 12.0), ("1e2", 100.0)])
def test_a_positive_number(monkeypatch, text, value):
    monkeypatch.setenv("VLLM_GAUDI_HOST_MEMORY_GIB", text)
    assert envs.get("VLLM_GAUDI_HOST_MEMORY_GIB") == value


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-3",
        "",
        "4GiB",
        "nan",
        "inf",
    ],
)
def test_a_number_that_is_not_positive_is_refused(monkeypatch, text):
    monkeypatch.setenv("VLLM_GAUDI_HOST_MEMORY_GIB", text)
    with pytest.raises(ValueError, match=f"VLLM_GAUDI_HOST_MEMORY_GIB='{text}' is not a positive number"):
        envs.get("VLLM_GAUDI_HOST_MEMORY_GIB")


def test_a_text_is_taken_as_it_is(monkeypatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", " cpu")
    assert envs.get("VLLM_TARGET_DEVICE") == " cpu"


def test_a_variable_is_read_when_it_is_asked_for(monkeypatch):
    assert envs.get("VLLM_SKIP_WARMUP") is False
    monkeypatch.setenv("VLLM_SKIP_WARMUP", "1")
    assert envs.get("VLLM_SKIP_WARMUP") is True


def test_a_name_outside_the_table_is_a_fault_of_ours():
    with pytest.raises(KeyError):
        envs.get("VLLM_NO_SUCH_VARIABLE")


def test_set_default_sets_only_what_the_user_left_open(monkeypatch):
    name = "PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE"
    monkeypatch.setenv(name, "for the undoing")
    monkeypatch.delenv(name)
    assert envs.set_default(name, "0") is True
    assert os.environ[name] == "0"
    assert envs.set_default(name, "1") is False
    assert os.environ[name] == "0"
    monkeypatch.setenv(name, "")
    assert envs.set_default(name, "1") is False
    assert os.environ[name] == ""
