# SPDX-License-Identifier: Apache-2.0
"""vLLM's norms and rotary embeddings: ours on Gaudi (with the stub of the bridge); on a host vLLM's own norms.

The references behind the ops, and our rotary layers as they run on a host, are held against vLLM's own arithmetic bit
for bit.
"""

from __future__ import annotations

import pytest
import torch

from tests import with_stub
from vllm_gaudi.ops.registry import resolve

# Builds each layer as a model does and runs it beside vLLM's plain torch.
LAYERS = """
import json
from vllm_gaudi import device
if device.is_hpu():
    device.device_type = lambda: "cpu"
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm_gaudi.layers import register_layers

register_layers()
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding, RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding

torch.manual_seed(0)
device.initialize()
if device.is_hpu():
    from habana_frameworks import calls
T, HEADS, KV, SIZE = 11, 4, 2, 32
config = VllmConfig()
config.compilation_config.custom_ops = ["all"]
found = {}


def compare(name, layer, *args):
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if device.is_hpu():
        calls.reset()
    made, native = layer(*args), layer.forward_native(*args)
    made, native = (x if isinstance(x, tuple) else (x,) for x in (made, native))
    kernels = calls.names() if device.is_hpu() else []
    worst = max(float((a - b).abs().max()) for a, b in zip(made, native) if a is not None)
    found[name] = [type(layer).__name__, kernels, worst < 2e-6]


rope = dict(head_size=SIZE, max_position_embeddings=64, base=10000.0, is_neox_style=True, dtype=torch.float32)
with set_current_vllm_config(config), torch.inference_mode():
    x, residual = torch.randn(T, 64), torch.randn(T, 64)
    q, k = torch.randn(T, HEADS * SIZE), torch.randn(T, KV * SIZE)
    at, axes = torch.randint(0, 64, (T,)), torch.randint(0, 64, (3, T))
    compare("rms", RMSNorm(64), x)
    compare("rms_residual", RMSNorm(64), x, residual)
    compare("rms_no_weight", RMSNorm(64, has_weight=False), x)
    compare("rms_part", RMSNorm(64, var_hidden_size=32), x)
    compare("gemma", GemmaRMSNorm(64), x)
    compare("gemma_residual", GemmaRMSNorm(64), x, residual)
    compare("gemma_heads", GemmaRMSNorm(SIZE), torch.randn(T, 2 * HEADS, SIZE)[:, :HEADS])
    compare("rope", RotaryEmbedding(rotary_dim=8, **rope), at, q, k)
    compare("rope_no_key", RotaryEmbedding(rotary_dim=32, **rope), at, q)
    compare("rope_pairs", RotaryEmbedding(rotary_dim=16, **{**rope, "is_neox_style": False}), at, q, k)
    for interleaved in (False, True):
        mrope = MRotaryEmbedding(rotary_dim=16, mrope_section=[4, 2, 2], mrope_interleaved=interleaved, **rope)
        compare(f"mrope_{interleaved}", mrope, axes, q, k)
    compare("mrope_text", mrope, at, q, k)
    scaled = dict(scaling_factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, orig_max_position=32)
    compare("llama3", Llama3RotaryEmbedding(rotary_dim=32, **rope, **scaled), at, q, k)
print("FACTS " + json.dumps(found))
"""
ON_GAUDI = {
    "rms": ["HPURMSNorm", ["FusedRMSNorm"], True],
    "rms_residual": ["HPURMSNorm", ["FusedRMSNorm"], True],
    "rms_no_weight": ["HPURMSNorm", [], True],
    "rms_part": ["HPURMSNorm", [], True],
    "gemma": ["HPUGemmaRMSNorm", ["FusedRMSNorm"], True],
    "gemma_residual": ["HPUGemmaRMSNorm", ["FusedRMSNorm"], True],
    "gemma_heads": ["HPUGemmaRMSNorm", ["FusedRMSNorm"], True],
    "rope": ["HPURotaryEmbedding", ["rotary", "rotary"], True],
    "rope_no_key": ["HPURotaryEmbedding", ["rotary"], True],
    "rope_pairs": ["HPURotaryEmbedding", ["rotary", "rotary"], True],
    "mrope_False": ["HPUMRotaryEmbedding", ["rotary", "rotary"], True],
    "mrope_True": ["HPUMRotaryEmbedding", ["rotary", "rotary"], True],
    "mrope_text": ["HPUMRotaryEmbedding", ["rotary", "rotary"], True],
    "llama3": ["Llama3RotaryEmbedding", [], True],
}


def test_on_gaudi_the_layers_are_ours_and_give_what_vllms_give():
    assert with_stub.facts("-c", LAYERS) == ON_GAUDI


def test_on_a_host_the_norms_are_vllms_own(capsys):
    own = {
        name: [cls.removeprefix("HPU") if cls.endswith("Norm") else cls, [], True]
        for name, (cls, _, _) in ON_GAUDI.items()
    }
    exec(LAYERS, {"__name__": "__main__"})  # in this process, which has vLLM already
    assert with_stub.facts_in(capsys.readouterr().out) == own


@pytest.fixture(scope="module", autouse=True)
def imported():
    import vllm  # noqa: F401


@pytest.mark.xdist_group("vllm")
class TestReferences:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("with_residual", [False, True])
    def test_the_norm_has_the_bits_of_vllms(self, dtype, weight_dtype, with_residual):
        from vllm.ir.ops import layernorm  # noqa: F401  (registers the ops)
        from vllm.ir.ops.layernorm import fused_add_rms_norm, rms_norm

        torch.manual_seed(1)
        x, residual = torch.randn(9, 64).to(dtype), torch.randn(9, 64).to(dtype)
        weight = torch.randn(64).to(weight_dtype)
        ours, summed = resolve("rms_norm", "cpu")(x, weight, 1e-6, residual if with_residual else None)
        if with_residual:
            theirs, their_sum = fused_add_rms_norm(x, residual, weight, 1e-6)
            assert torch.equal(summed, their_sum)
        else:
            theirs = rms_norm(x, weight, 1e-6)
            assert summed is None
        assert torch.equal(ours, theirs) and ours.dtype == dtype

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("is_neox", [True, False])
    @pytest.mark.parametrize("rotary_dim", [8, 32])
    def test_the_rotation_has_the_bits_of_vllms(self, dtype, is_neox, rotary_dim):
        from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

        torch.manual_seed(1)
        x, table = torch.randn(9, 4, 32).to(dtype), torch.randn(20, rotary_dim).to(dtype)
        at = torch.randint(0, 20, (9,))
        theirs, _ = RotaryEmbedding.forward_static(at, x.flatten(1), None, 32, rotary_dim, table, is_neox)
        ours = resolve("rotary_embedding", "cpu")(x, *table[at].chunk(2, dim=-1), is_neox)
        assert torch.equal(ours.flatten(1), theirs)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("is_interleaved", [False, True])
    @pytest.mark.parametrize("section", [[2, 1, 1], [11, 11, 10], [24, 20, 20], [4, 0, 4], [1, 3, 0], [0, 2, 6]])
    def test_three_axes_have_the_bits_of_vllms(self, section, is_interleaved, dtype):
        """Positions differ by axis, so that an angle taken from another axis shows; and text's, one for all axes."""
        rotary, query, key = rotary_layer(section, is_interleaved, dtype)
        at = torch.stack([torch.randperm(64)[:9] for _ in range(3)]).int()
        for positions in (at, at[0]):
            ours, theirs = rotary.forward_oot(positions, query, key), rotary.forward_native(positions, query, key)
            assert type(rotary).__name__ == "HPUMRotaryEmbedding"
            assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        one_place = rotary.forward_oot(at[:1].expand(3, -1), query, key)
        assert all(torch.equal(one, other) for one, other in zip(one_place, ours, strict=True))

    def test_the_axes_are_chosen_when_the_layer_is_built(self):
        """A call makes no tensor to choose by: vLLM counts channels, in int64, each time."""
        from torch.utils._python_dispatch import TorchDispatchMode

        class Dtypes(TorchDispatchMode):
            seen: set[torch.dtype] = set()  # noqa: RUF012

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                self.seen |= {x.dtype for x in (out if isinstance(out, (tuple, list)) else (out,))}
                return out

        rotary, query, key = rotary_layer([2, 1, 1], True, torch.float32)
        at = torch.randint(0, 64, (3, 9), dtype=torch.int32)
        with Dtypes() as ours:
            rotary.forward_oot(at, query, key)
        assert ours.seen <= {torch.float32, torch.int32}
        with Dtypes() as theirs:
            rotary.forward_native(at, query, key)
        assert torch.int64 in theirs.seen
        assert not {"_is_second_axis", "_is_third_axis"} & set(rotary.state_dict())


def rotary_layer(section, is_interleaved, dtype):
    """Our layer with ``section``, as a model on a host builds it, and heads to turn."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding

    from vllm_gaudi.layers import register_layers

    register_layers()
    torch.manual_seed(2)
    with set_current_vllm_config(VllmConfig()):
        rotary = MRotaryEmbedding(
            2 * sum(section) + 8, 2 * sum(section), 64, 1e4, True, dtype, section, mrope_interleaved=is_interleaved
        )
    return rotary, *(torch.randn(9, heads * rotary.head_size).to(dtype) for heads in (4, 2))
