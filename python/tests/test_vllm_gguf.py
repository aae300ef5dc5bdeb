"""conclave.vllm.FusedMoE on blocks of GGUF files, loaded by name as an engine does: against layers
of the same files, and against gguf-py's values in float64."""

from __future__ import annotations

import pathlib
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
gguf = pytest.importorskip("gguf", reason="gguf is not installed")

import conclave  # noqa: E402
from conclave import vllm  # noqa: E402
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError, Error  # noqa: E402
from support.problems import FLOAT32_BAR, expected_output, worst_error  # noqa: E402

pytestmark = pytest.mark.usefixtures("float32_products")

TESTDATA = pathlib.Path(__file__).parents[2] / "testdata"
PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
PREFIX = "model.layers.0.mlp.experts"


def layer_of(experts, hidden, inner, ids, shares, **arguments):
    """A layer of given choices, and the mapping of names that an engine has."""
    arguments = {"params_dtype": torch.float32, **arguments}
    return vllm.FusedMoE(
        experts,
        ids.shape[1],
        hidden,
        inner,
        quant_config={"quant_method": "gguf"},
        custom_routing_function=lambda **_: (torch.tensor(shares), torch.tensor(ids)),
        expert_mapping=vllm.FusedMoE.make_expert_params_mapping(
            None, "gate_proj", "down_proj", "up_proj", experts
        ),
        **arguments,
    )


def run(layer, hidden):
    logits = torch.zeros(len(hidden), layer.logical_num_experts)
    return layer(torch.tensor(hidden), logits).numpy()


def load(layer, tensors):
    """Names below the block of experts."""
    layer.layer_name = PREFIX
    return layer.load_weights((name, torch.tensor(data)) for name, data in tensors)


# Files.


def file_tensors(path):
    """Types first, then the bytes, as vLLM's iterator hands them out: stacks by expert 0's name."""
    types, weights, biases = [], [], []
    for tensor in gguf.GGUFReader(path).tensors:
        parts = tensor.name.split(".")
        matrix = parts[2].removeprefix("ffn_").removesuffix("_exps") if len(parts) > 2 else ""
        alone = len(parts) == 5 and matrix in PROJECTIONS
        if not alone and not (matrix in PROJECTIONS and "_exps" in parts[2]):
            continue
        expert = parts[3] if alone else "0"
        data = numpy.array(tensor.data)
        if parts[-1] == "bias":
            biases += [(f"{e}.{PROJECTIONS[matrix]}.bias", row) for e, row in enumerate(data)]
            continue
        name = f"{expert}.{PROJECTIONS[matrix]}.qweight"
        types.append((f"{name}_type", numpy.uint8(tensor.tensor_type)))
        weights.append((name, data))
    return types, weights, biases


# Codes of 4 and of 8 bits, with offsets and without, types of their own for gate, up and down,
# experts in tensors of their own, values, biases.
FILES = {
    "qwen3moe-q4_k_m": {},
    "qwen3moe-iq4": {},
    "minimax-m2-iq3": {},
    "llama-tq": {},
    "llama-old": {},
    "olmoe-iq4_nl": {},
    "qwen2moe-f16": {},
    "gpt-oss-mxfp4": {"activation": "swigluoai", "swiglu_limit": 7.0, "has_bias": True},
}


@pytest.mark.parametrize("types_last", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_codes_are_those_of_the_file(name, types_last):
    path = sorted((TESTDATA / "gguf" / name).glob("*.gguf"))[0]
    whole = conclave.Layer.from_checkpoint(path, 0)
    spec = whole.spec
    random = numpy.random.default_rng(3)
    hidden = random.standard_normal((9, spec.hidden_size)).astype("float32")
    ids = numpy.stack([random.permutation(spec.num_experts)[:2] for _ in range(9)]).astype("int32")
    shares = random.random((9, 2)).astype("float32")
    sizes = (spec.num_experts, spec.hidden_size, spec.intermediate_size)
    layer = layer_of(*sizes, ids, shares, **FILES[name])
    types, weights, biases = file_tensors(path)
    tensors = [*weights, *types] if types_last else [*types, *weights]
    assert len(load(layer, [*tensors, *biases])) == len(tensors) + len(biases)
    out = run(layer, hidden)
    routed_alone = spec.shared.mode == "none"
    if routed_alone and spec.top_k == 2:
        expected = whole(hidden, topk_ids=ids, topk_weights=shares)
        numpy.testing.assert_array_equal(out, expected)
    assert worst_error(out, expected_of(path, hidden, ids, shares)) <= FLOAT32_BAR


def expected_of(path, hidden, ids, shares):
    """The routed sum of gguf-py's values, by the tensors' own names."""
    values = {}
    for tensor in gguf.GGUFReader(path).tensors:
        exact = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values[tensor.name] = numpy.asarray(exact, dtype="float64")

    def stack(matrix):
        stacked = values.get(f"blk.0.ffn_{matrix}_exps.weight")
        if stacked is not None:
            return stacked
        found = []
        while (alone := values.get(f"blk.0.ffn_{matrix}.{len(found)}.weight")) is not None:
            found.append(alone)
        return numpy.stack(found)

    gate, up, down = (stack(matrix) for matrix in PROJECTIONS)
    biases = [values.get(f"blk.0.ffn_{matrix}_exps.bias") for matrix in PROJECTIONS]
    if biases[0] is None:
        return expected_output(hidden, numpy.concatenate([gate, up], 1), down, ids, shares)
    total = numpy.zeros(hidden.shape)
    for token, row in enumerate(hidden.astype("float64")):
        for expert, share in zip(ids[token], shares[token], strict=True):
            g, u = (w[expert] @ row + b[expert] for w, b in ((gate, biases[0]), (up, biases[1])))
            g, u = numpy.minimum(g, 7), numpy.clip(u, -7, 7)
            inner = g / (1 + numpy.exp(-1.702 * g)) * (u + 1)
            total[token] += float(share) * (down[expert] @ inner + biases[2][expert])
    return total


# Blocks that gguf-py makes.

EXPERTS, HIDDEN, INNER = 5, 96, 128
KINDS = ("Q4_0", "Q5_1", "Q8_0", "Q4_1", "Q5_0")


class Model:
    """Experts whose matrices have types in turn, and the values that gguf-py reads from them."""

    def __init__(self, kinds=KINDS, hidden=HIDDEN, inner=INNER, gated=True):
        random = numpy.random.default_rng(5)
        self.sizes = (EXPERTS, hidden, inner)
        self.blocks, self.kinds, exact = {}, {}, {}
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        for at, (matrix, shape) in enumerate(list(shapes.items())[0 if gated else 1 :]):
            for expert in range(EXPERTS):
                kind = gguf.GGMLQuantizationType[kinds[(at + 2 * expert) % len(kinds)]]
                values = (random.standard_normal(shape) / shape[1] ** 0.5).astype("float32")
                blocks = gguf.quants.quantize(values, kind)
                self.blocks[matrix, expert], self.kinds[matrix, expert] = blocks, kind
                exact[matrix, expert] = gguf.quants.dequantize(blocks, kind)
        self.matrices = [matrix for matrix in shapes if (matrix, 0) in exact]
        self.values = {
            matrix: numpy.stack([exact[matrix, e] for e in range(EXPERTS)]).astype("float64")
            for matrix in self.matrices
        }
        self.hidden = random.standard_normal((7, hidden)).astype("float32")
        self.ids = numpy.stack([random.permutation(EXPERTS)[:2] for _ in range(7)]).astype("int32")
        self.shares = random.random((7, 2)).astype("float32")

    def layer(self, **arguments):
        return layer_of(*self.sizes, self.ids, self.shares, **arguments)

    def tensors(self):
        """Expert by expert; in vLLM's mapping the one matrix without a gate is w1."""
        names = PROJECTIONS if len(self.matrices) == 3 else {"up": "gate_proj", "down": "down_proj"}
        for (matrix, expert), blocks in self.blocks.items():
            name = f"{expert}.{names[matrix]}.qweight"
            yield name, blocks
            yield f"{name}_type", numpy.array(int(self.kinds[matrix, expert]))

    def expected(self):
        up = [self.values[matrix] for matrix in self.matrices[:-1]]
        return expected_output(
            self.hidden, numpy.concatenate(up, 1), self.values["down"], self.ids, self.shares
        )


@pytest.mark.parametrize("kinds", [KINDS, *((kind,) for kind in KINDS), ("F16", "BF16"), ("F32",)])
def test_every_matrix_has_a_type_of_its_own(kinds):
    model = Model(kinds)
    layer = model.layer()
    assert len(load(layer, model.tensors())) == 2 * 3 * EXPERTS
    width = max(model.blocks[matrix, 0].shape[1] for matrix in ("gate", "up"))
    assert layer.w13_qweight.shape[:2] == (EXPERTS, 2 * INNER)
    assert layer.w13_qweight.shape[2] >= width and layer.w13_qweight.dtype == torch.uint8
    if len(kinds) == 1:
        stacked = [model.blocks["down", e].view("uint8") for e in range(EXPERTS)]
        assert numpy.array_equal(layer.w2_qweight.numpy(), numpy.stack(stacked))
    types = [[int(model.kinds[m, e]) for m in ("gate", "up")] for e in range(EXPERTS)]
    assert layer.w13_qweight_type.tolist() == types
    assert [view.shape[0] for view in layer.get_expert_weights()] == [EXPERTS] * 4
    assert worst_error(run(layer, model.hidden), model.expected()) <= FLOAT32_BAR


def test_one_product_has_no_gate():
    model = Model(("Q8_0", "Q4_0"), gated=False)
    layer = model.layer(activation="relu2_no_mul")
    load(layer, model.tensors())
    products = numpy.maximum(
        numpy.einsum("th,eih->tei", model.hidden.astype("float64"), model.values["up"]), 0
    )
    rows = numpy.einsum("tei,ehi->teh", products**2, model.values["down"])
    chosen = numpy.take_along_axis(rows, model.ids[:, :, None].astype(int), 1)
    expected = (chosen * model.shares[:, :, None]).sum(1)
    assert worst_error(run(layer, model.hidden), expected) <= FLOAT32_BAR


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_add_up(expert_parallel, stacked):
    model = Model(("Q5_1",) if stacked else KINDS)
    total = numpy.zeros(model.hidden.shape)
    for rank in range(2):
        if expert_parallel:
            split = vllm.FusedMoEParallelConfig(ep_size=2, ep_rank=rank, use_ep=True)
        else:
            split = vllm.FusedMoEParallelConfig(tp_size=2, tp_rank=rank)
        layer = model.layer(moe_parallel_config=split)
        tensors = list(model.tensors())
        if stacked:
            kind = int(gguf.GGMLQuantizationType.Q5_1)
            tensors = []
            for matrix, name in PROJECTIONS.items():
                whole = numpy.stack([model.blocks[matrix, e] for e in range(EXPERTS)])
                tensors += [(f"0.{name}.qweight_type", numpy.uint8(kind))]
                tensors += [(f"0.{name}.qweight", whole)]
        load(layer, tensors)
        experts = {0: 3, 1: 2}[rank] if expert_parallel else EXPERTS
        inner = INNER if expert_parallel else INNER // 2
        assert layer.w13_qweight.shape[:2] == (experts, 2 * inner)
        assert layer.w2_qweight.shape[1] == HIDDEN
        total += run(layer, model.hidden)
    assert worst_error(total, model.expected()) <= FLOAT32_BAR


def test_a_layer_follows_its_blocks():
    """New bytes, and new types, which need codes of another width."""
    first, second = Model(("Q4_0",)), Model(("Q8_0",))
    layer = first.layer()
    load(layer, first.tensors())
    assert worst_error(run(layer, first.hidden), first.expected()) <= FLOAT32_BAR
    load(layer, second.tensors())
    assert worst_error(run(layer, second.hidden), second.expected()) <= FLOAT32_BAR
    load(layer, first.tensors())
    assert worst_error(run(layer, first.hidden), first.expected()) <= FLOAT32_BAR
    with torch.no_grad():
        layer.w2_qweight[:, 0] = 0  # a block of zeros has scales of 0
    zeroed = first.expected()
    zeroed[:, 0] = 0
    out = run(layer, first.hidden)
    assert not out[:, 0].any() and worst_error(out, zeroed) <= FLOAT32_BAR


def test_experts_move_with_their_types():
    """Over two ranks and their slots, with rows of as many bytes as their types take."""
    model = Model()
    group = conclave.local_group(2)
    load_of_experts = torch.tensor([[1, 2, 3, 4, 50]])

    def on_rank(rank):
        split = vllm.FusedMoEParallelConfig(ep_size=2, ep_rank=rank, use_ep=True)
        layer = model.layer(enable_eplb=True, num_redundant_experts=1, moe_parallel_config=split)
        layer.expert_mapping = vllm.FusedMoE.make_expert_params_mapping(
            None, "gate_proj", "down_proj", "up_proj", EXPERTS, 1
        )
        load(layer, model.tensors())
        state = vllm.EplbState(ep_group=group[rank])
        moved = state.add_model(layer, global_expert_load=load_of_experts).experts_moved
        return moved, run(layer, model.hidden)

    with ThreadPoolExecutor(2) as threads:
        (first, one), (second, other) = threads.map(on_rank, range(2))
    assert first + second > 0
    assert worst_error(one + other, model.expected()) <= FLOAT32_BAR


def refusal(call, kind=Error):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_what_does_not_fit_is_named():
    model = Model(("Q8_0",))
    layer = model.layer()
    assert "w13_qweight_type: w3 of expert 0" in refusal(lambda: run(layer, model.hidden))
    blocks = torch.tensor(model.blocks["down", 0])

    def put(name, tensor, shard, expert=1):
        layer.weight_loader(getattr(layer, name), tensor, name, shard, expert)

    assert "number" in refusal(lambda: put("w2_qweight_type", torch.tensor(99), "w2"))
    assert "one number" in refusal(lambda: put("w2_qweight_type", torch.zeros(2), "w2"))
    assert "expected one of w2" in refusal(lambda: put("w2_qweight", blocks, "w1"))
    assert "expected 96 rows" in refusal(lambda: put("w2_qweight", blocks[:-1], "w2"))
    assert "expected bytes" in refusal(lambda: put("w2_qweight", blocks.int(), "w2"))
    assert "expected 5 experts" in refusal(lambda: put("w2_qweight", blocks[None], "w2"))
    load(layer, model.tensors())
    with torch.no_grad():
        layer.w2_qweight_type[3] = int(gguf.GGMLQuantizationType.F32)
    message = refusal(lambda: run(layer, model.hidden), ConclaveValueError)
    text = "w2 of expert 3 expected 512 bytes for a row of 128 columns of F32, found 136"
    assert f"w2_qweight: {text}" in message
    put("w2_qweight_type", torch.tensor(2), "w2", 3)  # Q4_0, whose rows have fewer bytes
    message = refusal(lambda: run(layer, model.hidden), ConclaveValueError)
    assert "expected 72 bytes for a row of 128 columns of Q4_0, found 136" in message
    put("w2_qweight_type", torch.tensor(24), "w2", 3)  # I8, which are no weights
    put("w2_qweight", torch.zeros(96, 128, dtype=torch.uint8), "w2", 3)
    message = refusal(lambda: run(layer, model.hidden))
    assert "down[3]" in message and "I8" in message


def test_slices_within_blocks_are_refused():
    model = Model(("Q8_0",), inner=96)  # 48 columns a rank, a block and a half
    split = vllm.FusedMoEParallelConfig(tp_size=2, tp_rank=1)
    types_first = sorted(model.tensors(), key=lambda pair: not pair[0].endswith("_type"))
    for tensors in (types_first, types_first[::-1]):
        layer = model.layer(moe_parallel_config=split)

        def call(layer=layer, tensors=tensors):
            load(layer, tensors)
            run(layer, model.hidden)

        message = refusal(call, ConclaveUnsupportedError)
        assert "a rank's 48 columns are no whole blocks of Q8_0" in message
