"""conclave.vllm.FusedMoE under torch.compile(fullgraph=True); living layers by name; the log."""

from __future__ import annotations

import copy
import gc
import logging

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from conclave import vllm  # noqa: E402
from conclave.errors import ConclaveValueError  # noqa: E402
from support.devices import seeded  # noqa: E402

SIZES = {"num_experts": 8, "top_k": 2, "hidden_size": 48, "intermediate_size": 40}


def filled(**arguments):
    layer = vllm.FusedMoE(**{**SIZES, **arguments})
    generator = seeded(7)
    for param in layer.parameters():
        param.requires_grad_(False)
        param.data.copy_(torch.randn(param.shape, generator=generator) / 4)
    return layer


def tokens(count=11, columns=8):
    generator = seeded(1)
    return torch.randn(count, 48, generator=generator), torch.randn(
        count, columns, generator=generator
    )


class Model(torch.nn.Module):
    """Layers with a gate of the model's, one after another."""

    def __init__(self, layers):
        super().__init__()
        self.gates = torch.nn.ModuleList(torch.nn.Linear(48, 8) for _ in layers)
        self.layers = torch.nn.ModuleList(layers)
        self.requires_grad_(False)

    def forward(self, hidden, **more):
        for gate, layer in zip(self.gates, self.layers, strict=True):
            hidden = hidden + layer(torch.tanh(hidden), gate(hidden), **more)
        return hidden


def compiled(module, backend="eager"):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # other tests of this process have some
    return torch.compile(module, fullgraph=True, dynamic=True, backend=backend)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [list, torch.tensor])
def test_numbers_of_tokens_reach_the_layer_from_a_graph(form):
    layer = filled()
    run = compiled(layer)
    for count in (3, 11):
        given = tokens(count)
        close(run(*given, rank_tokens=form([count])), layer(*given))
    with pytest.raises(ConclaveValueError, match="rank_tokens"):
        run(*tokens(5), rank_tokens=form([4]))
    assert torch._dynamo.utils.counters["graph_break"] == {}


def test_a_model_is_one_graph_for_any_number_of_tokens():
    torch.manual_seed(0)
    shared = torch.nn.Linear(48, 48)
    model = Model([filled(), filled(shared_experts=shared)])
    run = compiled(model, "aot_eager")
    for count in (1, 11, 64, 0):
        hidden = tokens(count)[0]
        close(run(hidden), model(hidden))
    assert torch._dynamo.utils.counters["graph_break"] == {}


def test_the_default_backend_takes_it_too():
    layer = filled()
    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True, dynamic=True)
    hidden, logits = tokens()
    close(run(hidden, logits), layer(hidden, logits))


def test_equal_layers_share_a_graph():
    """More than dynamo compiles anew for one function."""
    layers = [filled() for _ in range(12)]
    for i, layer in enumerate(layers):
        layer.w2_weight.data *= i + 1
    torch._dynamo.reset()
    hidden, logits = tokens()
    for layer in layers:
        found = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
        close(found(hidden, logits), layer(hidden, logits))
    twin = copy.deepcopy(layers[1])
    twin.w2_weight.data.zero_()
    found = torch.compile(twin, fullgraph=True, dynamic=True, backend="eager")
    assert not found(hidden, logits).any()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_replicas_are_counted_and_padding_is_not(as_tensor):
    layer = filled(enable_eplb=True, num_redundant_experts=4)
    load = torch.zeros(1, 12, dtype=torch.int32)
    table = torch.full((1, 8, 2), -1)
    table[0, :, 0] = torch.arange(8)
    table[0, :4, 1] = torch.arange(8, 12)
    layer.set_eplb_state(0, load, table, (table >= 0).sum(2))
    hidden, logits = tokens(50)
    run = compiled(layer, "aot_eager")
    for count in (20, 33):
        load.zero_()
        expected = layer(hidden, logits, num_tokens=count)
        counted = load.clone()
        load.zero_()
        given = torch.tensor(count) if as_tensor else count
        close(run(hidden, logits, num_tokens=given), expected)
        assert torch.equal(load, counted) and load.sum() == 2 * count
    seen = []
    layer.set_capture_fn(seen.append)
    mask = torch.arange(50) % 2 == 0
    close(run(hidden, logits, padding_mask=mask), layer(hidden, logits, padding_mask=mask))
    assert len(seen) == 2 and torch.equal(*seen)


def test_gates_transforms_zero_experts_and_tables():
    torch.manual_seed(0)
    bias = torch.zeros(11)
    bias[8:] = 0.2
    layer = filled(
        zero_expert_type="identity",
        e_score_correction_bias=bias,
        gate=torch.nn.Linear(48, 11),
        shared_experts=torch.nn.Linear(48, 48),
        shared_expert_gate=torch.nn.Linear(48, 1),
        routed_scaling_factor=2.5,
        apply_routed_scale_to_output=True,
    )
    hidden, logits = tokens()
    close(compiled(layer)(hidden), layer(hidden))
    table = torch.randint(0, 8, (20, 2), dtype=torch.int32)
    hashed = filled(hash_indices_table=table)
    words = torch.arange(11)
    close(compiled(hashed)(hidden, logits, words), hashed(hidden, logits, words))
    narrow = filled(
        routed_input_transform=torch.nn.Linear(24, 48),
        routed_output_transform=torch.nn.Linear(48, 24),
        shared_experts=torch.nn.Linear(24, 24),
        return_shared_apart=True,
    )
    rows = hidden[:, :24].bfloat16().float()
    for found, expected in zip(compiled(narrow)(rows, logits), narrow(rows, logits), strict=True):
        close(found, expected)


class Same(vllm.UnquantizedFusedMoEMethod):
    def apply(self, layer, x, topk_weights, topk_ids):
        return x


def test_methods_of_your_own_are_in_the_node():
    layer = filled()
    layer._replace_quant_method(Same(layer.moe_config))
    hidden, logits = tokens()
    out = compiled(layer)(hidden, logits)
    assert torch.equal(out, hidden) and out.data_ptr() != hidden.data_ptr()


def test_sums_over_ranks_are_a_node(monkeypatch):
    dist = torch.distributed
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(2))
    split = vllm.FusedMoEParallelConfig(tp_size=2, tp_rank=0)
    layer = filled(
        moe_parallel_config=split, reduce_results=True, shared_experts=torch.nn.Identity()
    )
    hidden, logits = tokens()
    kept = hidden.clone()
    close(compiled(layer)(hidden, logits), layer(hidden, logits))
    assert torch.equal(hidden, kept)


def test_gradients_are_refused_in_a_graph_too():
    layer = filled()
    hidden, logits = tokens()
    with pytest.raises(Exception, match="require gradients"):
        compiled(layer, "aot_eager")(hidden.requires_grad_(), logits).sum().backward()


# Living layers, and the log.


def test_living_layers_by_name():
    context = vllm.static_forward_context
    before = len(context)
    layers = [filled(prefix=f"named.{i}.experts") for i in (1, 0)]
    filled()  # without a name
    assert list(context)[before:] == ["named.1.experts", "named.0.experts"]
    assert context["named.0.experts"] is layers[1] and "named.2.experts" not in context
    with pytest.raises(ConclaveValueError, match="Duplicate layer name"):
        filled(prefix="named.1.experts")
    del layers
    gc.collect()
    assert "named.1.experts" not in context
    with pytest.raises(KeyError):
        context["named.1.experts"]


def test_what_is_logged_and_how_often(caplog):
    split = vllm.FusedMoEParallelConfig(ep_size=4, ep_rank=1, use_ep=True)
    with caplog.at_level(logging.DEBUG, "conclave.vllm"):
        for _ in range(3):
            filled(moe_parallel_config=split, num_experts=9)
        filled()
        for _ in range(2):
            ranks = vllm.FusedMoEParallelConfig(tp_size=2, dp_size=2)
            vllm.FusedMoEConfig(8, 2, 48, 8, ranks, torch.float32, max_num_tokens=77)
    texts = [record.getMessage() for record in caplog.records if record.name == "conclave.vllm"]
    told = [text for text in texts if "EP Rank" in text]
    assert len(told) == 1
    for part in ("[EP Rank 1/4]", "linear", "2/9", "0->3, 1->4"):
        assert part in told[0]
    assert sum("FusedMoEConfig = " in text for text in texts) == 4
    assert sum("max_num_tokens=77" in text for text in texts if "Using" in text) == 1
