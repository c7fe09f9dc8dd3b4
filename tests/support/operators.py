# SPDX-License-Identifier: Apache-2.0
"""What a step asks of the device, operator by operator, and the rules that a Gaudi holds it to.

Owns: the recorder (a dispatch mode for operators, a function mode for reads by the host), the phases of a step, the
rules. Never: the table of operators (``operator_table``), or anything that changes what a step computes.

Ordering rule: ``watch`` comes after the engine has started; what start-up does is no step's business.

On a CPU host a device tensor cannot be told from a host one, so every tensor of a step counts as a device tensor, but
for those that vLLM's own input batch keeps while it rewrites its rows (phase ``rows``).
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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

SHAPE_DEPENDS_ON_DATA = (
    "nonzero",
    "nonzero_numpy",
    "argwhere",
    "masked_select",
    "unique",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave.Tensor",
)
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
# These take (tensor, dim, indices, ...).
INDEXED = (
    "aten::index_select",
    "aten::index_copy_",
    "aten::index_copy",
    "aten::index_add_",
    "aten::index_fill_",
    "aten::gather",
    "aten::scatter",
    "aten::scatter_",
    "aten::scatter_add_",
)
SELECTIONS = ("aten::where", "aten::masked_fill", "aten::masked_fill_")
INT64 = (torch.int64, torch.uint64)
FLOAT64 = (torch.float64, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class Breach:
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
    """What was seen: operators by phase with the dtypes they touched, reads by place, and the breaches."""

    operators: dict[str, Counter[str]] = field(default_factory=dict)  # operator -> phase -> calls
    dtypes: dict[str, set[str]] = field(default_factory=dict)
    reads: Counter[str] = field(default_factory=Counter)
    breaches: dict[Breach, int] = field(default_factory=dict)
    num_steps: int = 0
    num_sampled: int = 0  # steps in which tokens were sampled
    num_awaited: int = 0  # copies to the host that a later step has waited for
    eager_shapes: set[str] = field(default_factory=set)  # calls on the device outside graphs, but for views

    def add(self, breach: Breach) -> None:
        self.breaches[breach] = self.breaches.get(breach, 0) + 1


class Watch:
    """Records an engine's steps in ``record``. ``allowed``: what the rules let pass."""

    def __init__(self, runner: Any, allowed: Exceptions, record: Record | None = None):
        self.record = Record() if record is None else record
        self.allowed = allowed
        self._phase: str | None = None
        self._in_region = False
        caches = runner.step.caches
        self._persistent: dict[int, torch.Tensor] = {}
        self.remember([*caches.k, *caches.v, *caches.conv, *caches.ssm])
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

    def about_to(self, func: Any, args: Any) -> None:
        """Look at a call before it is made: on a CPU an index out of range ends it."""
        phase = self._phase
        if phase is not None:
            self._check_indices(
                func._schema,
                args,
                lambda rule, detail: self.record.add(Breach(rule, str(func), phase, _site(), detail)),
            )

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record a call that was made, and what it breaks."""
        if self._phase is None:
            return
        record, phase = self.record, self._phase
        schema = func._schema
        name = str(func)
        base = schema.name.split("::")[1]
        short = f"{base}.{schema.overload_name}" if schema.overload_name else base
        record.operators.setdefault(name, Counter())[phase] += 1
        given = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        record.dtypes.setdefault(name, set()).update(_dtype(t) for t in (*given, *made))

        is_view = any(value.alias_info and not value.alias_info.is_write for value in schema.returns)
        if not (self._in_region or is_view or phase in ("rows", "output")):
            record.eager_shapes.add(f"{name} {[tuple(t.shape) for t in given]}")

        def breach(rule: str, detail: str = "") -> None:
            record.add(Breach(rule, name, phase, _site(), detail))

        if short in SHAPE_DEPENDS_ON_DATA or base in SHAPE_DEPENDS_ON_DATA:
            breach("the shape depends on data")
        if short == "_local_scalar_dense" and phase != "output":
            breach("the host waits for the device")
        if any(t.dtype in FLOAT64 for t in (*given, *made)):
            breach("float64 or complex numbers")
        self._check_int64(schema, given, made, breach)
        self._check_masks(schema, args, breach)
        if self._in_region:
            self._check_writes(schema, short, args, kwargs, breach)
            if schema.name in SELECTIONS and any(not t.is_floating_point() for t in made):
                breach("integers are selected in a compiled region")

    def wait(self, function: str, *, is_of_this_step: bool) -> None:
        """The host waits for a copy, or for the device."""
        if self._phase is not None and is_of_this_step:
            self.record.add(Breach("the host waits for the device", function, self._phase, _site()))
        elif self._phase is not None:
            self.record.num_awaited += 1

    def read(self, function: str) -> None:
        """The host asks for a tensor's values."""
        if self._phase is None:
            return
        site = _site()
        self.record.reads[site] += 1
        if site not in self.allowed.reads and self._phase != "rows":
            self.record.add(Breach("the host waits for the device", function, self._phase, site))

    # The rules

    def _check_int64(self, schema: Any, given: list, made: list, breach: Callable[..., None]) -> None:
        name = schema.name.split("::")[1]
        if self._phase == "rows" or name in self.allowed.int64_moves:
            return
        if any(t.dtype in INT64 for t in (*given, *made)):
            takes_indices = schema.name in INDEXED or name in ("embedding", "index")
            if takes_indices and not any(t.dtype in INT64 for t in (*given[:1], *made)):
                return  # int64 as an index alone
            phases, _ = self.allowed.int64.get(name, ("", ""))
            if self._phase not in phases.split():
                breach("int64 arithmetic", f"{[_dtype(t) for t in given]} -> {[_dtype(t) for t in made]}")

    def _check_masks(self, schema: Any, args: Any, breach: Callable[..., None]) -> None:
        if schema.name not in ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"):
            return
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                breach("the shape depends on data", "boolean index")

    def _check_indices(self, schema: Any, args: Any, breach: Callable[..., None]) -> None:
        if schema.name == "aten::embedding":
            self._check_range(args[1], args[0].shape[0], breach)
        elif schema.name in ("aten::index", "aten::index_put_"):
            for dim, index in enumerate(args[1]):
                if index is not None and index.dtype not in (torch.bool, torch.uint8):
                    self._check_range(index, args[0].shape[dim], breach)
        elif schema.name in INDEXED:
            self._check_range(args[2], args[0].shape[args[1]], breach)
        elif schema.name == "vllm_gaudi::copy_rows_":
            for tensors, rows in ((args[0], args[2]), (args[1], args[3])):
                self._check_range(rows, min(tensor.shape[0] for tensor in tensors), breach)
        elif schema.name == "vllm_gaudi::zero_rows_":
            self._check_range(args[1], min(tensor.shape[0] for tensor in args[0]), breach)

    def _check_range(self, index: torch.Tensor, size: int, breach: Callable[..., None]) -> None:
        if index.numel():
            low, high = int(index.min()), int(index.max())
            if low < 0 or high >= size:
                breach("an index is negative or too large", f"{low}..{high} into {size}")

    def _check_writes(self, schema: Any, short: str, args: Any, kwargs: Any, breach: Callable[..., None]) -> None:
        if short == "view.dtype":
            breach("a view of another dtype in a compiled region")
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for tensor in (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)):
                owner = self._persistent.get(tensor.untyped_storage().data_ptr())
                if owner is not None and _extent(tensor) != _extent(owner):
                    breach("a write through a view in a compiled region", f"{_extent(tensor)} of {_extent(owner)}")


class _Operators(TorchDispatchMode):
    def __init__(self, watch: Watch):
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # an operator that torch makes of others is seen as those
            out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        self._watch.about_to(func, args)
        out = func(*args, **(kwargs or {}))
        self._watch.see(func, args, kwargs or {}, out)
        return out


class _Reads(TorchFunctionMode):
    def __init__(self, watch: Watch):
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        to_host = name == "to" and len(args) > 1 and args[1] == "cpu" and not (kwargs or {}).get("non_blocking")
        if name in HOST_READS or to_host:
            self._watch.read(name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watch(runner: Any, allowed: Exceptions, record: Record | None = None) -> Iterator[Watch]:
    """Record every operator of ``runner``'s steps until the end of the ``with``. Wraps the runner's owners."""
    seen = Watch(runner, allowed, record)
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


def _mark_phases(runner: Any, seen: Watch, stack: contextlib.ExitStack) -> None:
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
    phase(runner.step.inputs, "remember", "inputs")
    phase(runner.step.store, "before_forward", "store")
    phase(runner.step.store, "save", "store")
    _within(stack, runner.graphs, "run", forward)
    phase(runner.graphs, "logits", "logits")
    phase(runner.graphs, "prompt_logits", "logits")
    phase(runner.step.prompt_logprobs, "_logprobs", "sampler")
    _within(stack, runner.sampling, "sample", sample)
    phase(runner.sampling, "_update_rows", "rows")
    phase(runner.sampling, "collect", "output")
    phase(runner.step, "_keep_logits", "logits")
    phase(runner, "run_pads", "inputs")
    phase(runner.sampling, "warm_up", "sampler")
    phase(runner.step.store, "warm_up", "store")
    phase(runner, "sample_tokens", "output")

    def execute(*_: Any) -> Context:
        seen.record.num_steps += 1
        return seen.phase("inputs")

    _within(stack, runner, "execute_model", execute)


def _mark_waits(runner: Any, seen: Watch, stack: contextlib.ExitStack) -> None:
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


def _mark_regions(runner: Any, seen: Watch, stack: contextlib.ExitStack) -> None:
    """Mark the modules that would be compiled, and the logits product."""

    def region(*args: Any, **kwargs: Any) -> Context:
        return seen.region([args, kwargs])

    for module in regions(runner.model):
        _within(stack, module, "forward", region)
    _within(stack, runner.graphs, "_logits", region)


# ----------------------------------------------------------------------------------------------------------------------


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _extent(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), _dtype(tensor)


def _site() -> str:
    """``module:function`` of the nearest caller that is neither torch's nor this file's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module not in (__name__, "__main__") and module.split(".")[0] not in ("torch", "contextlib"):
            return f"{module}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"
