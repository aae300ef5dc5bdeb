"""`patch` on lists of experts whose matrices a quantiser packed: codes are taken as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")

import conclave.transformers as library  # noqa: E402
from conclave.spec import LayerOptions  # noqa: E402
from conclave.transformers._list_experts import read_list  # noqa: E402
from conclave.transformers._packed_linears import _gptq  # noqa: E402
from support import remote_code as remote  # noqa: E402
from support.coded import Coder  # noqa: E402
from support.problems import FLOAT32_BAR, worst_error  # noqa: E402

pytestmark = pytest.mark.usefixtures("float32_products")

GROUP = 8
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # of the codes in a word


def in_words(codes: Any, axis: int, places: tuple[int, ...] = tuple(range(8))) -> Any:
    """Codes of 4 bits, eight to a word along an axis."""
    parts = codes.long().movedim(axis, -1).unflatten(-1, (-1, 8))
    words = sum(parts[..., code] << (4 * place) for place, code in enumerate(places))
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, axis).contiguous()


class Quantised(torch.nn.Module):
    """A matrix as a quantiser's module keeps it; its own code unpacks and multiplies."""

    def __init__(self, linear: Any, coder: Coder) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.group_size, self.bias = GROUP, None
        codes = coder.whole(0, 16, (self.in_features, self.out_features))
        groups = self.in_features // GROUP
        zeros = coder.whole(5, 11, (groups, self.out_features))
        scales = coder.uniform(groups, self.out_features) / (6 * self.in_features**0.5)
        order = torch.arange(self.in_features) // GROUP
        self.pack(codes, zeros, scales, order)

    def spread(self, codes: Any, zeros: Any, scales: Any, order: Any) -> None:
        self._exact = (codes - zeros[order]).float() * scales[order]

    def forward(self, x: Any) -> Any:
        return x @ self._exact.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


class Gptq(Quantised):
    bits, sym, desc_act = 4, False, True

    def pack(self, codes: Any, zeros: Any, scales: Any, order: Any) -> None:
        order = order.flip(0) if self.desc_act else order
        self.register_buffer("qweight", in_words(codes, 0))
        self.register_buffer("qzeros", in_words(zeros - 1, 1))
        self.register_buffer("scales", scales)
        self.register_buffer("g_idx", order.int())
        self.spread(codes, zeros, scales, order)


class Awq(Quantised):
    w_bit = 4

    def pack(self, codes: Any, zeros: Any, scales: Any, order: Any) -> None:
        self.register_buffer("qweight", in_words(codes, 1, AWQ_PLACES))
        self.register_buffer("qzeros", in_words(zeros, 1, AWQ_PLACES))
        self.register_buffer("scales", scales)
        self.spread(codes, zeros, scales, order)


class PlainGptq(Gptq):
    desc_act = False


def model_of(kind: Any) -> Any:
    config = remote.config("unknown", hidden_act="silu")
    torch.manual_seed(5)
    model = remote.Model(config, remote.MixtralBlock).eval()
    coder = Coder(6)
    with torch.no_grad():
        for block in model.modules():
            if not isinstance(block, remote.MixtralBlock):
                continue
            for expert in block.experts:
                for name, linear in list(expert.named_children()):
                    if isinstance(linear, torch.nn.Linear):
                        setattr(expert, name, kind(linear, coder))
    return model


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(11)[None] % remote.VOCAB)


def matrix_of(linear: Any) -> Any:
    """What a matrix of codes stands for, [out, in] in float64."""
    if isinstance(linear, Quantised):
        return linear._exact.T.double()
    import bitsandbytes as bnb

    weight = linear.weight
    return bnb.functional.dequantize_4bit(weight.data, weight.quant_state).double()


def check_blocks(model: Any) -> None:
    """Each block of experts in a forward of its patched model, against float64 on the rows and the
    choices that it had: what torch computes between rounds as well."""
    calls: list[Any] = []
    hooks = [
        block.register_forward_hook(lambda block, given, out: calls.append((block, given[0], out)))
        for block in model.modules()
        if isinstance(block, remote.MixtralBlock)
    ]
    logits(model)
    for hook in hooks:
        hook.remove()
    assert calls
    for block, hidden, (out, scores) in calls:
        rows = hidden.flatten(0, -2).double()
        shares, ids = torch.topk(torch.softmax(scores, 1, dtype=torch.float), block.top_k)
        shares = block.weigh(shares).double()
        expected = torch.zeros_like(rows)
        for index, expert in enumerate(block.experts):
            w1, w2, w3 = (matrix_of(getattr(expert, name)) for name in ("w1", "w2", "w3"))
            product = torch.nn.functional.silu(rows @ w1.T) * (rows @ w3.T) @ w2.T
            expected += torch.where(ids == index, shares, 0).sum(1, keepdim=True) * product
        assert worst_error(out.flatten(0, -2), expected) <= FLOAT32_BAR


@pytest.mark.parametrize("kind", [Gptq, PlainGptq, Awq])
def test_words_of_a_quantiser_are_taken_as_they_are(kind: Any) -> None:
    model = model_of(kind)
    before = logits(model)
    report = library.patch(model, release=True)
    assert [m.replaced for m in report.modules] == ["experts"], str(report)
    (replacement,) = library._patch._patches[model]
    spec = replacement.layer.spec
    assert spec.weight_dtype == "int4" and spec.quant.zeros == "point"
    assert spec.quant.block_cols == GROUP
    assert spec.quant.has_column_order == (kind is Gptq)
    check_blocks(model)
    expert = next(m for m in model.modules() if isinstance(m, kind))
    assert expert.qweight.numel() > 0, "its buffers are not freed"
    library.unpatch(model)
    assert torch.equal(logits(model), before)


def test_matrices_that_are_packed_in_several_ways_say_so() -> None:
    model = model_of(Gptq)
    block = next(m for m in model.modules() if isinstance(m, remote.MixtralBlock))
    block.experts[1].w2.group_size = 2 * GROUP
    report = library.patch(model)
    assert not report.modules[0].replaced and "several ways" in report.modules[0].reason


def bnb_model(kind: str) -> Any:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

    def quantised(linear: Any, coder: Coder) -> Any:
        found = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=False,
            compute_dtype=torch.float32,
            compress_statistics=kind == "nf4-nested",
            quant_type=kind[:3],
        )
        found.load_state_dict({"weight": linear.weight.data})
        return found.to("cpu")

    return model_of(quantised)


@pytest.mark.parametrize("kind", ["fp4", "nf4", "nf4-nested"])
def test_codes_of_bitsandbytes_are_taken_as_they_are(kind: str, monkeypatch: Any) -> None:
    """Rows of whole blocks: on a CPU bitsandbytes 0.50.2 unpacks blocks over the ends of rows
    wrongly (0.40 of the weights' length off, where its blocks say 0.09)."""
    monkeypatch.setattr(remote, "H", 128)
    monkeypatch.setattr(remote, "INNER", 64)
    model = bnb_model(kind)
    report = library.patch(model)
    assert [m.replaced for m in report.modules] == ["experts"], str(report)
    (replacement,) = library._patch._patches[model]
    assert replacement.layer.spec.weight_dtype == ("bnb_fp4" if kind == "fp4" else "nf4")
    check_blocks(model)


@pytest.mark.parametrize("name", ["mixtral-bnb-int8", "qwen3_moe-bnb-int8"])
def test_int8_of_bitsandbytes_is_taken_as_it_is(name: str) -> None:
    """The package's own files, in modules that hold them as its do; its int8 products quantise rows
    too, which layers do not."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    from support.method_layers import QUANTISED, golden_of

    stored = load_file(QUANTISED / name / "model.safetensors")
    names = ("w1", "w2", "w3") if "mixtral" in name else ("gate_proj", "down_proj", "up_proj")
    found = [key.partition(".experts.")[2] for key in stored if ".experts." in key]
    numbers = sorted({int(rest.partition(".")[0]) for rest in found})
    experts = torch.nn.ModuleList()
    for number in numbers:
        parts = {}
        for own, part in zip(names, ("w1", "w2", "w3"), strict=True):
            key = next(k for k in stored if f".experts.{number}.{own}.weight" in k)
            linear = Int8(stored[key], stored[key.removesuffix("weight") + "SCB"])
            parts[part] = linear
        experts.append(Expert(parts))
    traits = read_list(experts)
    hidden, ids, weights, expected = golden_of(name)
    layer = traits.layer(experts, ids.shape[1], LayerOptions())
    assert layer.spec.weight_dtype == "int8"
    out = layer(hidden, topk_ids=ids, topk_weights=weights)
    assert worst_error(out, expected) <= FLOAT32_BAR


class Int8(torch.nn.Module):
    """A matrix as `Linear8bitLt` keeps it."""

    def __init__(self, codes: Any, steps: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.state = SimpleNamespace(SCB=steps)

    def forward(self, x: Any) -> Any:
        return x @ (self.weight.to(x.dtype) * (self.state.SCB / 127)[:, None].to(x.dtype)).T


class Expert(torch.nn.Module):
    def __init__(self, parts: dict[str, Any]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Any) -> Any:
        return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))


@pytest.mark.parametrize(("version", "format"), [(None, "gptq"), (1, "gptq"), (2, "gptq_v2")])
def test_zero_points_are_of_the_version_that_a_module_says(
    version: int | None, format: str
) -> None:
    words = {"qweight": torch.zeros(4, 8, dtype=torch.int32), "scales": torch.ones(1, 8)}
    words |= {"qzeros": torch.zeros(1, 1, dtype=torch.int32), "g_idx": torch.zeros(32)}
    module = SimpleNamespace(**words, bits=4, group_size=32, in_features=32)
    if version:
        module.qzero_format = lambda: version
    packed = _gptq(module)
    assert packed is not None and packed.method["checkpoint_format"] == format
