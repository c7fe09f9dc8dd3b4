# SPDX-License-Identifier: Apache-2.0
"""Two ranks exchange tensors through the communicator, over the stub's "hccl" (gloo underneath) and over gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import with_stub

# Each rank checks what it got and writes down how; forked where all is imported and no device is in use.
RANKS = """
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import vllm.platforms

vllm.platforms.current_platform  # as a worker would: the plugin prepares the process first
from vllm_gaudi import device
from vllm_gaudi.distributed.hpu_communicator import HpuCommunicator


def rank_main(rank, folder):
    device.initialize()
    dist.init_process_group(
        device.distributed_backend(), init_method=f"file://{folder}/store", world_size=2, rank=rank
    )
    backend = device.distributed_backend()
    groups = {"cpu_group": dist.new_group([0, 1], backend="gloo")}
    groups["device_group"] = dist.new_group([0, 1], backend=backend)
    it = HpuCommunicator(device=torch.device("cpu"), unique_name="tp:0", **groups)
    mine = [torch.arange(24.0).view(2, 3, 4) + 100 * r for r in range(2)]
    said = {"backend": dist.get_backend(groups["device_group"])}

    x = mine[rank].clone()
    out = it.all_reduce(x)
    said["all_reduce"] = out is x and torch.equal(x, mine[0] + mine[1])

    gather = dist.all_gather_into_tensor

    def strict(output, input, **kwargs):
        assert output.is_contiguous() and input.is_contiguous(), "HCCL takes no strides"
        gather(output, input, **kwargs)

    dist.all_gather_into_tensor = strict
    for dim in (0, 1, 2, -1):
        got = it.all_gather(mine[rank], dim)
        said[f"all_gather {dim}"] = torch.equal(got, torch.cat(mine, dim)) and got.is_contiguous()
    got = it.all_gather(mine[rank].transpose(0, 2), 1)
    said["all_gather of a view"] = torch.equal(got, torch.cat([m.transpose(0, 2) for m in mine], 1))

    dist.all_gather_into_tensor = gather

    got = it.gather(mine[rank], dst=1, dim=1)
    said["gather"] = got is None if rank == 0 else torch.equal(got, torch.cat(mine, 1))
    x = mine[rank].clone()
    said["broadcast"] = torch.equal(it.broadcast(x, src=1), mine[1])

    compile_backend = "hpu_backend" if device.is_hpu() else "aot_eager"

    def layer(x):
        return it.all_gather(it.all_reduce(x * 2) + 1, -1)

    with torch.inference_mode():
        got = torch.compile(layer, backend=compile_backend, dynamic=False, fullgraph=True)(mine[rank])
    half = (mine[0] + mine[1]) * 2 + 1
    said["compiled"] = torch.equal(got, torch.cat((half, half), -1))
    if device.is_hpu():
        from habana_frameworks import calls

        said["created"] = calls.of("hccl")
        said["marks"] = calls.of("mark_step")
    Path(folder, f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


torch.multiprocessing.start_processes(rank_main, (sys.argv[1],), nprocs=2, start_method="fork")
"""


@pytest.mark.parametrize("backend", ["hccl", "gloo"])
def test_two_ranks_exchange(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "hccl":
        with_stub.forked("-c", RANKS, str(tmp_path))
    else:  # this process is a host's
        monkeypatch.setattr("sys.argv", ["-c", str(tmp_path)])
        exec(RANKS, {"__name__": "__main__"})
    for rank in range(2):
        said: dict[str, Any] = json.loads((tmp_path / f"{rank}.json").read_text())
        assert said.pop("backend") == backend
        if backend == "hccl":
            assert {"rank": rank, "size": 2} in said.pop("created")
            assert said.pop("marks") == [], "eager mode marks no steps"
        assert len(said) == 9 and all(said.values()), said
