# SPDX-License-Identifier: Apache-2.0
"""The dry run of an engine: vLLM's own start, up to the first tensor that would take memory.

Owns: the configuration of a directory that may hold a config.json and nothing else, and one rank's worker whose device
is torch's "meta": model, caches and bucket grid are those of a started engine, with shapes and without bytes.
Never: weights, a device, a process group of more than this process, a sum of its own.

Ordering rule: as at a start: configuration, model, block size, specs, layout, groups, memory, pool, scheduler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.structured_output import StructuredOutputManager

from vllm_gaudi.cli import UsageError
from vllm_gaudi.platform import HpuPlatform
from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner
from vllm_gaudi.v1.worker.hpu_worker import HPUWorker

META = torch.device("meta")


# Configuration


@contextlib.contextmanager
def model_directory(given: str) -> Iterator[Path]:
    """The directory that vLLM is given: ``given``, or one made for a lone config file. Raises UsageError."""
    path = Path(given)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(
                f"{given} has no config.json; give the directory of a Hugging Face model, or its config.json"
            )
        check_json(path / "config.json")
        yield path
        return
    if not path.is_file():
        raise UsageError(
            f"there is no file or directory {given}; nothing is downloaded, so give a path (MODEL comes first)"
        )
    check_json(path)
    with tempfile.TemporaryDirectory(prefix="vllm-gaudi-") as directory:
        shutil.copy(path, Path(directory) / "config.json")
        yield Path(directory)


def check_json(path: Path) -> None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise UsageError(f"{path} is not the config.json of a Hugging Face model: it names no model_type")


def engine_args(directory: Path, flags: Sequence[str]) -> AsyncEngineArgs:
    """vLLM's own reading of the flags of `vllm serve`; a wrong one ends the process with vLLM's message."""
    if not isinstance(current_platform, HpuPlatform):
        raise UsageError("vLLM has not loaded this plugin; unset VLLM_TARGET_DEVICE and VLLM_PLUGINS")
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm-gaudi plan", allow_abbrev=False))
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", str(directory), *flags]))
    args.skip_tokenizer_init = True
    return args


def configuration(args: AsyncEngineArgs) -> VllmConfig:
    """The configuration of an engine with ``args``. Raises what vLLM and the platform raise at a start."""
    # An engine changes its arguments; a copy can be used again.
    return dataclasses.replace(args).create_engine_config(UsageContext.OPENAI_API_SERVER)


# The worker


class DryRunWorker(HPUWorker):
    """One of several equal ranks. ``total_memory``: bytes of its device; ``peak``: of its profile run."""

    def __init__(self, config: VllmConfig, total_memory: int, peak: int):
        super().__init__(config, 0, 0, "")
        self._total = total_memory
        self._peak = peak

    def init_device(self) -> None:
        self.device = META

    def _load_model(self, load_dummy_weights: bool) -> torch.nn.Module:
        """vLLM's model, its parameters without values."""
        with set_default_torch_dtype(self.model_config.dtype), META:
            return initialize_model(vllm_config=self.vllm_config)

    def _total_memory(self) -> int:
        return self._total

    def _taken_memory(self) -> int:
        return self._weight_bytes

    def _profile(self) -> int:
        return self._peak


@contextlib.contextmanager
def one_rank_of(config: VllmConfig) -> Iterator[None]:
    """Layers that ask for their share get rank 0's, and nobody else is there. Raises RuntimeError beside an engine."""
    if torch.distributed.is_initialized():
        raise RuntimeError("an engine runs in this process; make a plan in another one")
    with tempfile.TemporaryDirectory(prefix="vllm-gaudi-") as directory:
        # The ranks of this group never talk, since nothing is computed; so there is one, which says how many there are.
        parallel_state.init_distributed_environment(1, 0, f"file://{directory}/store", 0, "gloo")
        try:
            with set_current_vllm_config(config):
                parallel_state.ensure_model_parallel_initialized(1, 1)
            group = parallel_state.get_tp_group()
            group.world_size = config.parallel_config.tensor_parallel_size
            yield
        finally:
            # vLLM keeps rotary embeddings for the life of a process, by their arguments; these have no values.
            _ROPE_DICT.clear()
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


# The start


class DryRun:
    """An engine with ``config``, as far as it gets. Raises what a start raises before memory is counted.

    ``problem``: what it raises then, None where it would serve; with a problem the pool has one block.
    """

    def __init__(self, config: VllmConfig, total_memory: int, peak: int):
        self.config = config
        self.problem: Exception | None = None
        self.num_blocks: int | None = None
        self.worker = worker = DryRunWorker(config, total_memory, peak)
        with one_rank_of(config):
            worker.init_device()
            worker.load_model()
            current_platform.update_block_size_for_backend(config)
            register_all_kvcache_specs(config)
            specs = worker.get_kv_cache_spec()
            layout = resolve_kv_cache_layout(config, [worker.get_supported_kv_cache_layouts()], list(specs.values()))
            worker.set_kv_cache_layout(layout.name)
            groups = kv_cache_utils.get_kv_cache_groups(config, dict(specs))
            try:
                available = worker.determine_available_memory()
                (pool,) = kv_cache_utils.get_kv_cache_configs(config, [specs], [available])
                self._serve(pool)
            except (RuntimeError, ValueError) as error:
                self.problem = error
                self._build(KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups))

    def _build(self, pool: KVCacheConfig) -> None:
        with set_current_vllm_config(self.config):
            self.worker.initialize_from_config(pool)

    def _serve(self, pool: KVCacheConfig) -> None:
        """Caches of the final size, and a scheduler over their blocks."""
        config = self.config
        shared = kv_cache_utils.generate_scheduler_kv_cache_config([pool])
        config.cache_config.num_gpu_blocks = shared.num_blocks
        config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in shared.kv_cache_groups)
        config.validate_block_size()
        self._build(pool)
        block_size, hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(shared, config)
        config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=shared,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        self.num_blocks = shared.num_blocks

    @property
    def runner(self) -> HPUModelRunner:
        return self.worker.model_runner

    @property
    def num_parameters(self) -> int:
        """Of this rank."""
        return sum(parameter.numel() for parameter in self.worker.get_model().parameters())


@dataclass(frozen=True)
class Attempt:
    """A start as far as it got: ``error`` is what stopped it, None where it would serve."""

    config: VllmConfig | None
    engine: DryRun | None
    error: Exception | None


def attempt(args: AsyncEngineArgs, total_memory: int, peak: int) -> Attempt:
    """Start with ``args``. Whatever stops a dry run would stop a start, whose code it runs. Raises UsageError."""
    config = None
    try:
        config = configuration(args)
        engine = DryRun(config, total_memory, peak)
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001  (vLLM raises what it likes)
        return Attempt(config, None, error)
    return Attempt(config, engine, engine.problem)


def message_of(error: BaseException, directory: Path, given: str) -> str:
    """An error of vLLM or ours in one line, with the path that the user gave."""
    errors = getattr(error, "errors", None)
    if callable(errors):  # pydantic wraps the sentence
        text = "; ".join(str(one["msg"]).removeprefix("Value error, ") for one in errors())
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.replace(str(directory), given).split()).rstrip(".")
