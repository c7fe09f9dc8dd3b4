# SPDX-License-Identifier: Apache-2.0
"""What every end-to-end test stands on: tiny checkpoints, poisoned caches, prompts of given lengths."""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.served import Served

# Before vLLM is imported anywhere: pages and slots start as NaN, so that whatever a step forgets to zero surfaces.
os.environ.setdefault("VLLM_GAUDI_POISON", "1")
os.environ.setdefault("VLLM_SKIP_WARMUP", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "checkpoints"


@pytest.fixture(scope="module", autouse=True)
def execution_mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """The mode of a module's engines: a host's own, or the one that ``pytest.mark.execution_mode`` of the module names.

    A module with several names runs once in each: see ``pytest_generate_tests``.
    """
    mode = getattr(request, "param", None) or modes_of(request.node)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_GAUDI_EXECUTION_MODE", mode)
        yield mode


def modes_of(node: pytest.Module) -> tuple[str, ...]:
    mark = node.get_closest_marker("execution_mode")
    return mark.args if mark is not None else ("host",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("execution_mode")
    if mark is not None and len(mark.args) > 1:
        metafunc.fixturenames.insert(0, "execution_mode")
        metafunc.parametrize("execution_mode", mark.args, indirect=True, scope="module")


@pytest.fixture(scope="session")
def checkpoint() -> Callable[..., Path]:
    """``checkpoint(name, dtype)``: the directory of a tiny checkpoint, made on first use."""
    from vllm_gaudi.testing import checkpoints

    gc.freeze()  # every engine collects garbage some times, and all that vLLM and torch imported is none

    def build(name: str, dtype: str = "float32") -> Path:
        return checkpoints.build(name, dtype, CACHE)

    return build


@pytest.fixture
def prompt() -> Callable[[int], list[int]]:
    """``prompt(n)``: n random token ids, the same in every run, different at every call of a test."""
    source = random.Random(20)

    def draw(length: int) -> list[int]:
        return [source.randrange(10, 500) for _ in range(length)]

    return draw


@pytest.fixture
def schedule_of() -> Callable[[Any], list[dict[str, int]]]:
    """``schedule_of(engine)``: a list that grows by one entry per step with work: tokens scheduled per request id."""

    def watch(opened: Any) -> list[dict[str, int]]:
        steps: list[dict[str, int]] = []
        schedule = opened.scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            if output.num_scheduled_tokens:
                steps.append(dict(output.num_scheduled_tokens))
            return output

        opened.scheduler.schedule = watched
        return steps

    return watch


@pytest.fixture
def preemptions_of() -> Iterator[Callable[..., Counter[str]]]:
    """``preemptions_of(engine)``: how often each request is preempted from now on; ``before(request)`` comes first."""
    watched: list[Any] = []

    def watch(opened: Any, before: Callable[[Any], None] = lambda request: None) -> Counter[str]:
        counts: Counter[str] = Counter()
        preempt = opened.scheduler._preempt_request

        def counted(request: Any, *args: Any, **kwargs: Any) -> None:
            counts[request.request_id.rsplit("-", 1)[0]] += 1
            before(request)
            preempt(request, *args, **kwargs)

        opened.scheduler._preempt_request = counted
        watched.append(opened.scheduler)
        return counts

    yield watch
    for scheduler in watched:
        scheduler.__dict__.pop("_preempt_request", None)


class Shelf:
    """Holds one engine open at a time: the same flags give the same engine, other flags close it and start another."""

    def __init__(self, checkpoint: Callable[..., Path]):
        self._checkpoint = checkpoint
        self._key = ""
        self._engine: Any = None

    def __call__(self, name: str, **flags: Any) -> Any:
        from vllm_gaudi.testing.engine import Engine

        key = repr((name, sorted(flags.items())))
        if key != self._key or self._engine is None or self._engine.scheduler.has_unfinished_requests():
            self.clear()
            self._engine, self._key = Engine(self._checkpoint(name), **flags), key
        return self._engine

    def clear(self) -> None:
        """Close what is open, if anything."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.close()


@pytest.fixture(scope="module")
def shelf(checkpoint: Callable[..., Path], execution_mode: str) -> Iterator[Shelf]:
    """``shelf(name, **flags)``: an engine that tests of this module share while they ask for the same flags."""
    it = Shelf(checkpoint)
    yield it
    it.clear()


@pytest.fixture(scope="module")
def served(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A live server of this module's own."""
    from tests.support.served import serving

    with serving(checkpoint("q35_dense"), tmp_path_factory.mktemp("serve") / "server.log") as it:
        yield it


@pytest.fixture
def lone_server(checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[Served]:
    """A live server for a test that ends it: of a module's own, another test may be left."""
    from tests.support.served import serving

    with serving(checkpoint("q35_dense"), tmp_path / "server.log") as it:
        yield it
