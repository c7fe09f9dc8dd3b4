# SPDX-License-Identifier: Apache-2.0
"""What a step asks of the device, operator by operator, and which of it breaks a rule.

Owns: the recorder (a dispatch mode for operators, a function mode for reads by the host) and the phases of a step.
Never: a rule (``operator_rules``), the table of operators (``operator_table``), or anything that changes what a step
computes.

Ordering rule: ``watch`` comes after the engine has started; what start-up does is no step's business.

On a CPU host a device tensor cannot be told from a host one, so every tensor of a step counts as a device tensor, but
for those that vLLM's own input batch keeps while it rewrites its rows (phase ``rows``).
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support import operator_rules
from tests.support.operator_rules import WAIT, Call, Rule, dtype_of, may_read
from tests.support.operator_table import Exceptions
from vllm_gaudi import device
from vllm_gaudi.device import HostCopy
from vllm_gaudi.v1.worker.graphs import regions

PHASES = {
    "inputs": "padded inputs of a forward are built and uploaded",
    "store": "fresh pages and slots are zeroed, checkpoints restored and saved",
    "prefill": "the model runs chunks of prompts (compiled, layer by layer)",
    "decode": "the model runs one token per request (compiled, layer by layer)",
    "logits": "the product with the vocabulary (compiled), for rows that sample and for scored prompts",
    "rows": "vLLM's input batch rewrites its sampling rows, on the host, and uploads what changed",
    "sampler": "vLLM's sampler",
    "output": "sampled tokens and logprobs go to the host",
}

HOST_READS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
    "__contains__",
    "is_nonzero",
    "equal",
    "allclose",
)


@dataclass(frozen=True)
class Violation:
    """One rule that one call broke."""

    rule: str
    operator: str
    phase: str
    site: str
    detail: str = ""

    def __str__(self) -> str:
        said = f" ({self.detail})" if self.detail else ""
        return f"{self.rule}: {self.operator}{said} in phase {self.phase}, from {self.site}"


@dataclass
class Record:
    """What was seen: operators by phase with the dtypes they touched, reads by place, and the violations."""

    operators: dict[str, Counter[str]] = field(default_factory=dict)  # operator -> phase -> calls
    dtypes: dict[str, set[str]] = field(default_factory=dict)
    reads: Counter[str] = field(default_factory=Counter)
    violations: dict[Violation, int] = field(default_factory=dict)
    num_steps: int = 0
    num_sampled: int = 0  # steps in which tokens were sampled
    num_awaited: int = 0  # copies to the host that a later step has waited for
    eager_shapes: set[str] = field(default_factory=set)  # calls on the device outside graphs, but for views

    def add(self, violation: Violation) -> None:
        self.violations[violation] = self.violations.get(violation, 0) + 1


class OperatorRecorder:
    """Records an engine's steps in ``record``. ``allowed``: what the rules let pass."""

    def __init__(self, runner: Any, allowed: Exceptions, record: Record | None = None):
        self.record = Record() if record is None else record
        self.allowed = allowed
        self._phase: str | None = None
        self._in_region = False
        caches = runner.step.caches
        self._persistent: dict[int, torch.Tensor] = {}
        self.remember([*caches.k, *caches.v, *caches.conv_states, *caches.ssm_states])
        self.remember([*runner.model.parameters(), *runner.model.buffers()])

    # What a call may be part of

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Calls inside belong to phase ``name`` of the step, unless an inner phase takes them."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    @property
    def now(self) -> str | None:
        return self._phase

    @contextlib.contextmanager
    def region(self, inputs: Iterable[Any] = ()) -> Iterator[None]:
        """Calls inside are in a compiled graph that is given ``inputs``."""
        given = [leaf for leaf in tree_leaves(list(inputs)) if isinstance(leaf, torch.Tensor)]
        before = dict(self._persistent), self._in_region
        self.remember(given)
        self._in_region = True
        try:
            yield
        finally:
            self._persistent, self._in_region = before

    def remember(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors exist before a graph runs; inside it only they themselves may be written."""
        for tensor in tensors:
            self._persistent.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    # What is seen

    def check_indices(self, func: Any, args: Any) -> None:
        """Hold a call to the rules that are looked at before it is made."""
        if self._phase is not None:
            self._judge(operator_rules.BEFORE, self._call(func, args, {}, None))

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record a call that was made, and what it breaks."""
        if self._phase is None:
            return
        call, record, name = self._call(func, args, kwargs, out), self.record, str(func)
        record.operators.setdefault(name, Counter())[call.phase] += 1
        record.dtypes.setdefault(name, set()).update(dtype_of(t) for t in (*call.given, *call.made))
        is_view = any(value.alias_info and not value.alias_info.is_write for value in call.schema.returns)
        if not (call.is_in_graph or is_view or call.phase in ("rows", "output")):
            record.eager_shapes.add(f"{name} {[tuple(t.shape) for t in call.given]}")
        self._judge(operator_rules.AFTER, call)

    def _call(self, func: Any, args: Any, kwargs: Any, out: Any) -> Call:
        assert self._phase is not None
        return Call(func, args, kwargs, out, self._phase, self._in_region, self._persistent, self.allowed)

    def _judge(self, rules: Mapping[str, Rule], call: Call) -> None:
        for name, rule in rules.items():
            for detail in rule(call):
                self.record.add(Violation(name, str(call.func), call.phase, _site(), detail))

    def wait(self, function: str, *, is_of_this_step: bool) -> None:
        """The host waits for a copy, or for the device."""
        if self._phase is not None and is_of_this_step:
            self.record.add(Violation(WAIT, function, self._phase, _site()))
        elif self._phase is not None:
            self.record.num_awaited += 1

    def read(self, function: str) -> None:
        """The host asks for a tensor's values."""
        if self._phase is None:
            return
        site = _site()
        self.record.reads[site] += 1
        if not may_read(site, self._phase, self.allowed):
            self.record.add(Violation(WAIT, function, self._phase, site))


class _Operators(TorchDispatchMode):
    def __init__(self, watch: OperatorRecorder):
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # an operator that torch makes of others is seen as those
            out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        self._watch.check_indices(func, args)
        out = func(*args, **(kwargs or {}))
        self._watch.see(func, args, kwargs or {}, out)
        return out


class _Reads(TorchFunctionMode):
    def __init__(self, watch: OperatorRecorder):
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        to_host = name == "to" and len(args) > 1 and args[1] == "cpu" and not (kwargs or {}).get("non_blocking")
        if name in HOST_READS or to_host:
            self._watch.read(name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watch(runner: Any, allowed: Exceptions, record: Record | None = None) -> Iterator[OperatorRecorder]:
    """Record every operator of ``runner``'s steps until the end of the ``with``. Wraps the runner's owners."""
    seen = OperatorRecorder(runner, allowed, record)
    with contextlib.ExitStack() as stack:
        _mark_phases(runner, seen, stack)
        _mark_regions(runner, seen, stack)
        _mark_waits(runner, seen, stack)
        stack.enter_context(_Reads(seen))
        stack.enter_context(_Operators(seen))
        yield seen


# The moments of a step

Context = contextlib.AbstractContextManager[Any]


def _put(stack: contextlib.ExitStack, owner: Any, name: str, function: Callable[..., Any]) -> None:
    """``function`` in the place of the owner's method, or function of its own, until the stack ends."""
    own = owner.__dict__
    if name in own:
        stack.callback(own.__setitem__, name, own[name])
    else:
        stack.callback(own.pop, name)
    own[name] = function


def _within(stack: contextlib.ExitStack, owner: Any, name: str, context: Callable[..., Context]) -> None:
    """Each call of the method is made inside ``context(*its arguments)``."""
    original = getattr(owner, name)

    def inside(*args: Any, **kwargs: Any) -> Any:
        with context(*args, **kwargs):
            return original(*args, **kwargs)

    _put(stack, owner, name, inside)


def _mark_phases(runner: Any, seen: OperatorRecorder, stack: contextlib.ExitStack) -> None:
    """The methods of the runner's owners name their phase."""

    def phase(owner: Any, method: str, name: str) -> None:
        _within(stack, owner, method, lambda *_, **__: seen.phase(name))

    def forward(inputs: Any) -> Context:
        return seen.phase("prefill" if inputs.attn.prefill is not None else "decode")

    def sample(*_: Any) -> Context:
        seen.record.num_sampled += 1
        return seen.phase("sampler")

    build = runner.step.inputs.build

    def built(*args: Any) -> Iterator[Any]:
        """What a generator does belongs to its phase, what is done with its items does not."""
        items = build(*args)
        while True:
            with seen.phase("inputs"):
                item = next(items, None)
            if item is None:
                return
            yield item

    _put(stack, runner.step.inputs, "build", built)
    phase(runner.step.inputs, "store_sampled_tokens", "inputs")
    phase(runner.step.store, "before_forward", "store")
    phase(runner.step.store, "save", "store")
    _within(stack, runner.graphs, "run", forward)
    phase(runner.graphs, "logits", "logits")
    phase(runner.step.prompt_logprobs, "_prompt_logits", "logits")
    phase(runner.step.prompt_logprobs, "_logprobs", "sampler")
    _within(stack, runner.sampling, "sample", sample)
    phase(runner.sampling, "_update_rows", "rows")
    phase(runner.sampling, "drain_sampled_tokens", "output")
    phase(runner.step, "_keep_logits", "logits")
    phase(runner, "dummy_run", "inputs")
    phase(runner.sampling, "warm_up", "sampler")
    phase(runner.step.store, "warm_up", "store")
    phase(runner, "sample_tokens", "output")

    def execute(*_: Any) -> Context:
        seen.record.num_steps += 1
        return seen.phase("inputs")

    _within(stack, runner, "execute_model", execute)


def _mark_waits(runner: Any, seen: OperatorRecorder, stack: contextlib.ExitStack) -> None:
    """A copy to the host is waited for in a later step than the one that has issued it; the device itself never is.

    Without async scheduling a step waits for its own tokens, and for nothing else.
    """
    make, get, synchronize = HostCopy.__init__, HostCopy.get, device.synchronize
    issued: weakref.WeakKeyDictionary[HostCopy, int] = weakref.WeakKeyDictionary()

    def made(copy: HostCopy, tensor: Any) -> None:
        make(copy, tensor)
        issued[copy] = seen.record.num_steps

    def awaited(copy: HostCopy) -> Any:
        seen.wait("HostCopy.get", is_of_this_step=runner.step.is_async and issued.get(copy) == seen.record.num_steps)
        return get(copy)

    def synchronized() -> None:
        seen.wait("device.synchronize", is_of_this_step=True)
        synchronize()

    for owner, name, function in ((HostCopy, "__init__", made), (HostCopy, "get", awaited)):
        stack.enter_context(mock.patch.object(owner, name, function))
    stack.enter_context(mock.patch.object(device, "synchronize", synchronized))


def _mark_regions(runner: Any, seen: OperatorRecorder, stack: contextlib.ExitStack) -> None:
    """Mark the modules that would be compiled, and the logits product."""

    def region(*args: Any, **kwargs: Any) -> Context:
        return seen.region([args, kwargs])

    for module in regions(runner.model):
        _within(stack, module, "forward", region)
    _within(stack, runner.graphs, "_logits", region)


# ----------------------------------------------------------------------------------------------------------------------


def _site() -> str:
    """``module:function`` of the nearest caller that is neither torch's nor this file's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module not in (__name__, "__main__") and module.split(".")[0] not in ("torch", "contextlib"):
            return f"{module}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"
