# SPDX-License-Identifier: Apache-2.0
"""Our layers in vLLM's place: registered once, the GDN core touches the rows it is told to, experts refuse what they
cannot do. Needs vLLM; layers are made without their weights, so no engine and no config is needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from vllm_gaudi.attention.metadata import DecodeAttention, HPUAttentionMetadata, PrefillAttention
from vllm_gaudi.ops.registry import get_ops, resolve

pytestmark = pytest.mark.xdist_group("vllm")  # with --dist loadgroup only one process imports it

K_HEADS, V_HEADS, K_DIM, V_DIM, HISTORY = 2, 4, 8, 6, 3
KEY_DIM, VALUE_DIM = K_HEADS * K_DIM, V_HEADS * V_DIM
CONV_DIM = 2 * KEY_DIM + VALUE_DIM
NUM_SLOTS = 4
ZERO, TRASH = NUM_SLOTS, NUM_SLOTS + 1
CHUNK = 4


@pytest.fixture(scope="module", autouse=True)
def registered():
    import vllm  # noqa: F401

    from vllm_gaudi.layers import register_layers

    register_layers()
    register_layers()


def test_vllm_builds_our_classes_for_its_own():
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    from vllm_gaudi.layers.gdn_attention import HPUGatedDeltaNetAttention
    from vllm_gaudi.layers.moe import HPUMoERunner, HPUUnquantizedFusedMoEMethod

    assert HPUGatedDeltaNetAttention.__mro__[1] is QwenGatedDeltaNetAttention
    assert type(QwenGatedDeltaNetAttention.__new__(QwenGatedDeltaNetAttention)) is HPUGatedDeltaNetAttention
    assert op_registry_oot["UnquantizedFusedMoEMethod"] is HPUUnquantizedFusedMoEMethod
    assert issubclass(HPUUnquantizedFusedMoEMethod, UnquantizedFusedMoEMethod)
    assert type(MoERunner.__new__(MoERunner)) is HPUMoERunner and issubclass(HPUMoERunner, MoERunner)


@pytest.fixture
def layer():
    """A GDN layer with random weights of its own (not vLLM's projections) and states that are NaN but for ZERO."""
    from vllm_gaudi.layers.gdn_attention import HPUGatedDeltaNetAttention

    torch.manual_seed(0)
    layer = object.__new__(HPUGatedDeltaNetAttention)
    torch.nn.Module.__init__(layer)
    layer._ops = get_ops()
    layer.num_local_k_heads, layer.num_local_v_heads = K_HEADS, V_HEADS
    layer.head_k_dim, layer.head_v_dim = K_DIM, V_DIM
    layer.local_key_dim, layer.local_value_dim = KEY_DIM, VALUE_DIM
    layer.conv1d = SimpleNamespace(weight=torch.randn(CONV_DIM, 1, HISTORY + 1))
    layer.A_log, layer.dt_bias = torch.randn(V_HEADS), torch.randn(V_HEADS)
    conv = torch.full((NUM_SLOTS + 2, HISTORY, CONV_DIM), float("nan"))
    ssm = torch.full((NUM_SLOTS + 2, V_HEADS, K_DIM, V_DIM), float("nan"))
    conv[ZERO], ssm[ZERO] = 0, 0
    layer.bind_state(conv, ssm, CHUNK)
    return layer


def metadata(slots, query, query_lens=None, batch=None):
    """Of sequences in ``slots``, padded to ``batch``; a decode where ``query_lens`` is None."""
    batch = batch or len(slots)
    pads = batch - len(slots)
    none = torch.zeros(batch, dtype=torch.int32)
    kind = (
        {"decode": DecodeAttention(none, none, none, none)}
        if query_lens is None
        else {
            "prefill": PrefillAttention(
                none[:, None], none, torch.tensor([*query_lens, *[0] * pads], dtype=torch.int32)
            )
        }
    )
    return HPUAttentionMetadata(
        batch=batch,
        query=query,
        kernel_block=16,
        slot_mapping=none,
        state_indices_in=torch.tensor([*slots, *[ZERO] * pads]),
        state_indices_out=torch.tensor([*slots, *[TRASH] * pads]),
        **kind,
    )


def rows_of(count):
    return torch.randn(count, CONV_DIM), torch.randn(count, V_HEADS), torch.randn(count, V_HEADS)


def same(one, two):
    """Bit for bit, NaN included."""
    return torch.equal(one.view(torch.int32), two.view(torch.int32))


class TestGdnCore:
    @pytest.mark.parametrize("is_prefill", [True, False])
    def test_only_rows_that_are_written_change_and_pads_go_to_trash(self, layer, is_prefill):
        conv, ssm = layer.kv_cache
        for slot in (1, 3):
            conv[slot], ssm[slot] = torch.randn_like(conv[slot]), torch.randn_like(ssm[slot])
        before = conv.clone(), ssm.clone()
        meta = metadata([3, 1], 8 if is_prefill else 1, query_lens=[8, 5] if is_prefill else None, batch=4)
        core = (layer._prefill if is_prefill else layer._decode)(meta, *rows_of(meta.num_rows))
        assert core.shape == (meta.num_rows, V_HEADS, V_DIM)
        assert core.isfinite().all()
        for state, old in zip((conv, ssm), before, strict=True):
            for row in (0, 2, ZERO):
                assert same(state[row], old[row]), row
            for row in (1, 3):
                assert state[row].isfinite().all() and not same(state[row], old[row]), row
            assert state[TRASH].isfinite().all()

    def test_the_order_of_rows_does_not_matter(self, layer):
        """Both state tensors are read completely before either is written."""
        conv, ssm = layer.kv_cache
        conv[:NUM_SLOTS], ssm[:NUM_SLOTS] = torch.randn(NUM_SLOTS, HISTORY, CONV_DIM), torch.randn_like(ssm[:NUM_SLOTS])
        start = conv.clone(), ssm.clone()
        mixed, b, a = rows_of(NUM_SLOTS)
        first = layer._decode(metadata([0, 1, 2, 3], 1), mixed, b, a)
        after = conv.clone(), ssm.clone()
        conv.copy_(start[0]), ssm.copy_(start[1])
        order = torch.tensor([2, 0, 3, 1])
        second = layer._decode(metadata(order.tolist(), 1), mixed[order], b[order], a[order])
        assert torch.equal(second, first[order])
        assert same(conv, after[0]) and same(ssm, after[1])

    def test_a_chunk_continues_where_the_last_one_left_its_slot(self, layer):
        conv, ssm = layer.kv_cache
        mixed, b, a = rows_of(12)
        conv[:2], ssm[:2] = 0, 0
        whole = layer._prefill(metadata([0], 12, query_lens=[12]), mixed, b, a)
        first = layer._prefill(metadata([1], 8, query_lens=[8]), mixed[:8], b[:8], a[:8])
        second = layer._prefill(metadata([1], 4, query_lens=[4]), mixed[8:], b[8:], a[8:])
        assert torch.equal(torch.cat((first, second)), whole)
        assert same(conv[0], conv[1]) and same(ssm[0], ssm[1])

    def test_a_decode_continues_a_prefill(self, layer):
        conv, ssm = layer.kv_cache
        mixed, b, a = rows_of(9)
        conv[:2], ssm[:2] = 0, 0
        whole = layer._prefill(metadata([0], 9, query_lens=[9]), mixed, b, a)
        layer._prefill(metadata([1], 8, query_lens=[8]), mixed[:8], b[:8], a[:8])
        last = layer._decode(metadata([1], 1), mixed[8:], b[8:], a[8:])
        torch.testing.assert_close(last[0], whole[8], rtol=1e-5, atol=1e-5)
        assert torch.equal(conv[0], conv[1])
        torch.testing.assert_close(ssm[0], ssm[1], rtol=1e-5, atol=1e-5)


class TestExperts:
    @pytest.fixture
    def method(self, monkeypatch):
        from vllm_gaudi.layers import moe

        monkeypatch.setattr(moe.UnquantizedFusedMoEMethod, "process_weights_after_loading", lambda self, layer: None)
        method = object.__new__(moe.HPUUnquantizedFusedMoEMethod)
        torch.nn.Module.__init__(method)
        method._ops = get_ops()
        method.moe = SimpleNamespace(has_bias=False)
        return method

    @staticmethod
    def layer(**changes):
        plain = {
            "use_grouped_topk": False,
            "e_score_correction_bias": None,
            "scoring_func": "softmax",
            "custom_routing_function": None,
            "apply_router_weight_on_input": False,
            "expert_map": None,
            "w13_weight": torch.nn.Parameter(torch.randn(3, 8, 16)),
            "w2_weight": torch.nn.Parameter(torch.randn(3, 16, 4)),
        }
        return SimpleNamespace(**{**plain, **changes})

    def test_what_the_supported_models_use_passes(self, method):
        assert method.process_weights_after_loading(self.layer()) is None
        assert method.is_monolithic

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"use_grouped_topk": True}, "grouped top-k"),
            ({"e_score_correction_bias": torch.zeros(2)}, "score correction bias"),
            ({"scoring_func": "sigmoid"}, "scoring by sigmoid"),
            ({"custom_routing_function": max}, "custom routing function"),
            ({"apply_router_weight_on_input": True}, "router weights on the input"),
            ({"expert_map": torch.zeros(2)}, "expert map"),
            ({"use_grouped_topk": True, "scoring_func": "sigmoid"}, "grouped top-k, scoring by sigmoid"),
        ],
    )
    def test_other_routers_are_refused(self, method, changes, said):
        with pytest.raises(NotImplementedError, match=said):
            method.process_weights_after_loading(self.layer(**changes))

    def test_expert_biases_are_refused(self, method):
        method.moe.has_bias = True
        with pytest.raises(NotImplementedError, match="expert biases"):
            method.process_weights_after_loading(self.layer())

    @pytest.mark.parametrize("variant", ["cpu", "hpu"])
    def test_prepared_weights_are_the_layers_own_and_no_state_of_the_model(self, method, variant):
        """Views: no memory is taken and a write is seen; weights that are put in their place are prepared anew."""
        method._ops = SimpleNamespace(prepare_experts=resolve("prepare_experts", variant))
        layer = self.layer()

        def storages() -> set[int]:
            leaves = tree_leaves(method._experts)
            return {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, torch.Tensor)}

        for _ in range(2):
            method.process_weights_after_loading(layer)
            assert storages() == {w.untyped_storage().data_ptr() for w in (layer.w13_weight, layer.w2_weight)}
            assert not method.state_dict() and not list(method.parameters()) and not list(method.buffers())
            before = layer.w13_weight, layer.w2_weight
            layer.w13_weight, layer.w2_weight = (torch.nn.Parameter(torch.randn_like(w)) for w in before)

    def test_nothing_is_left_to_be_made_at_the_first_forward(self, method):
        """vLLM makes its description of the weights when it is first asked for, which would be a graph of its own."""
        method.moe_quant_config = None
        method.process_weights_after_loading(self.layer())
        assert method.moe_quant_config is not None

    def test_the_runner_calls_the_experts_itself_and_its_name_is_in_no_graph(self):
        from vllm_gaudi.layers.moe import HPUMoERunner

        runner = object.__new__(HPUMoERunner)
        torch.nn.Module.__init__(runner)
        runner.layer_name = "model.layers.3.mlp.experts"
        asked = []
        runner._forward_impl = lambda *args: asked.append(args) or "the sum"
        assert runner._select_forward()("x", "logits", "shared", "ids", runner._encode_layer_name(), 0) == "the sum"
        assert asked == [("x", "logits", "shared", "ids")]
        assert runner._encode_layer_name() == ""


class TestRowTiles:
    """Where weights lie. What the products give is tests/unit/ops/test_linear."""

    @pytest.fixture
    def model(self):
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        class Linear(LinearBase):
            def __init__(self, *shape: int):
                torch.nn.Module.__init__(self)
                self.quant_method = UnquantizedLinearMethod()
                self.weight = torch.nn.Parameter(torch.randn(*shape), requires_grad=False)

        return torch.nn.ModuleDict({"linear": Linear(9, 24), "conv1d": Linear(9, 1, 4)})

    @pytest.mark.parametrize("tile", [0, 16])
    def test_linear_weights_are_laid_out_and_packed_where_asked_and_no_convolution(self, model, tile):
        from vllm_gaudi.layers.linear import RowTiledLinearMethod, install_row_tiles

        before = {name: module.weight.clone() for name, module in model.items()}
        assert install_row_tiles(model, tile, 16) == 2
        for name, module in model.items():
            assert type(module.quant_method) is RowTiledLinearMethod
            assert torch.equal(module.weight, before[name])
        assert model["linear"].weight.t().is_contiguous() == bool(tile)
        packed = model["linear"].quant_method._packed
        assert (packed and packed.rows) == (tile or None)
        assert model["conv1d"].weight.is_contiguous() and model["conv1d"].quant_method._packed is None
