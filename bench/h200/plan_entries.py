"""The entries that plans.py times, and the layers it compares them with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import conclave
from conclave import vllm

DEVICE = "cuda"
BEFORE_TOKENS = 4096
E4M3_MAX = 448.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    experts: int
    top_k: int
    hidden: int
    inner: int
    quantised: bool = False


CASES = {
    "e160-bf16": Sizes(160, 6, 5120, 1536),
    "e160-e4m3": Sizes(160, 6, 5120, 1536, quantised=True),
    "qwen3-30b": Sizes(128, 8, 2048, 768),
}


class Skip(Exception):
    """Why an entry has no time in a cell."""


@dataclasses.dataclass
class Inputs:
    """What all entries of a cell are given; a routing for each forward of a graph."""

    hidden: torch.Tensor
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    out: torch.Tensor


class Case:
    """The weights of a case, and its entries."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.w1, self.scale1 = self._matrix(2 * sizes.inner, sizes.hidden)
        self.w2, self.scale2 = self._matrix(sizes.hidden, sizes.inner)
        self.quant = conclave.QuantSpec()
        self.config = None
        if sizes.quantised:
            self.quant = conclave.QuantSpec(
                weights="block", block_rows=128, block_cols=128, activations="group"
            )
            self.config = conclave.fp8_w8a8_moe_quant_config(
                self.scale1, self.scale2, block_shape=[128, 128]
            )
        self._moe: Any = None
        self._routing: tuple[torch.Tensor, torch.Tensor] | None = None
        self._experts: Any = None
        self._block: Any = None

    def _matrix(self, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = (self.sizes.experts, rows, cols)
        if not self.sizes.quantised:
            matrix = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
            return matrix.normal_(std=cols**-0.5), None
        codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=DEVICE)
        for expert in codes:  # an expert at a time: float32 of all would be four times as much
            expert.copy_(torch.randn(rows, cols, device=DEVICE) * (E4M3_MAX / 8))
        blocks = (self.sizes.experts, -(-rows // 128), -(-cols // 128))
        return codes, torch.full(blocks, 8 / E4M3_MAX * cols**-0.5, device=DEVICE)

    def inputs(self, tokens: int, forwards: int) -> Inputs:
        sizes = self.sizes
        hidden = torch.randn(tokens, sizes.hidden, device=DEVICE).bfloat16()
        routings = []
        for _ in range(forwards):
            scores = torch.randn(tokens, sizes.experts, device=DEVICE).softmax(-1)
            weights, ids = scores.topk(sizes.top_k)
            routings.append((weights.contiguous(), ids.int().contiguous()))
        return Inputs(
            hidden, [i for _, i in routings], [w for w, _ in routings], torch.empty_like(hidden)
        )

    def layer(self, max_tokens: int, **more: Any) -> conclave.Layer:
        scales = {}
        if self.sizes.quantised:
            scales = {"gate_up_scale": self.scale1, "down_scale": self.scale2}
        spec = conclave.MoeSpec(top_k=self.sizes.top_k, quant=self.quant, has_gate="router" in more)
        return conclave.Layer.from_tensors(
            spec,
            gate_up=self.w1,
            down=self.w2,
            options=conclave.LayerOptions(max_tokens=max_tokens),
            **scales,
            **more,
        )

    def fused_experts(self, given: Inputs, i: int) -> None:
        conclave.fused_experts(
            given.hidden,
            self.w1,
            self.w2,
            given.weights[i],
            given.ids[i],
            quant_config=self.config,
            out=given.out,
        )

    def fused_moe(self, given: Inputs, i: int) -> torch.Tensor:
        """Routed by a function that has the choices already: the experts alone are timed."""
        if self._moe is None:
            self._moe = self._make_moe()
        self._routing = (given.weights[i], given.ids[i])
        return self._moe(given.hidden, given.hidden)

    def _make_moe(self) -> Any:
        quant = None
        if self.sizes.quantised:
            quant = {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            }
        with torch.device("meta"):
            moe = vllm.FusedMoE(
                self.sizes.experts,
                self.sizes.top_k,
                self.sizes.hidden,
                self.sizes.inner,
                params_dtype=torch.bfloat16,
                quant_config=quant,
                custom_routing_function=lambda *_, **__: self._routing,
            )
        found = {"w13_weight": self.w1, "w2_weight": self.w2}
        if self.sizes.quantised:
            found |= {"w13_weight_scale_inv": self.scale1, "w2_weight_scale_inv": self.scale2}
        for name, tensor in found.items():
            setattr(moe, name, torch.nn.Parameter(tensor, requires_grad=False))
        return moe

    def backend(self, given: Inputs, i: int) -> torch.Tensor:
        if self._experts is None:
            self._experts = self._make_experts()
        return self._experts(given.hidden, given.ids[i].long(), given.weights[i])

    def _config(self) -> Any:
        if self.sizes.quantised:
            raise Skip("transformers keeps e4m3 experts in modules of its own")
        try:
            import transformers
        except ImportError as error:
            raise Skip(str(error)) from error
        return transformers.Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=self.sizes.hidden,
            intermediate_size=128,
            moe_intermediate_size=self.sizes.inner,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=self.sizes.experts,
            num_experts_per_tok=self.sizes.top_k,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )

    def _make_model(self) -> Any:
        config = self._config()
        import transformers

        with torch.device("meta"):
            model = transformers.Qwen3MoeForCausalLM(config)
        experts = model.model.layers[0].mlp.experts
        experts.gate_up_proj = torch.nn.Parameter(self.w1, requires_grad=False)
        experts.down_proj = torch.nn.Parameter(self.w2, requires_grad=False)
        return model.bfloat16().eval()

    def _make_experts(self) -> Any:
        model = self._make_model()
        import conclave.transformers  # noqa: F401  registers the backend

        model.set_experts_implementation("conclave")
        return model.model.layers[0].mlp.experts

    def patched(self) -> Any:
        """The patched block of a model of one layer, and its gate's weights."""
        if self._block is None:
            model = self._make_model()
            import conclave.transformers

            gate = torch.randn(self.sizes.experts, self.sizes.hidden, device=DEVICE).bfloat16()
            mlp = model.model.layers[0].mlp
            mlp.gate.weight = torch.nn.Parameter(gate, requires_grad=False)
            report = conclave.transformers.patch(model)
            block = model.model.layers[0].mlp
            if "conclave" not in type(block).__module__ and not report:
                raise Skip("the block was not patched")
            self._block = (block, gate, model)
        return self._block


def chunked(layer: conclave.Layer, given: Inputs, i: int) -> None:
    """As entries ran before: as many tokens as are planned for, then the rest."""
    for begin in range(0, given.hidden.shape[0], BEFORE_TOKENS):
        part = slice(begin, begin + BEFORE_TOKENS)
        layer(
            given.hidden[part],
            topk_ids=given.ids[i][part],
            topk_weights=given.weights[i][part],
            out=given.out[part],
        )


Forward = Callable[[int], Any]


def forwards_of(case: Case, entry: str, given: Inputs, before: bool) -> tuple[Forward, Forward]:
    """The forward of an entry, and that of the layer it is compared with. Raises Skip."""
    tokens = given.hidden.shape[0]
    if entry == "patch":
        if before:
            raise Skip("planned as the backend was")
        block, gate, _ = case.patched()
        rows = given.hidden[None]
        spec = {"score": "softmax", "renormalize": "sum"}
        exact = _gated(case, gate, tokens, spec)
        return lambda _: block(rows), lambda _: exact(given.hidden, out=given.out)
    exact = case.layer(tokens)

    def reference(i: int) -> Any:
        exact(given.hidden, topk_ids=given.ids[i], topk_weights=given.weights[i], out=given.out)

    if before:
        layer = case.layer(BEFORE_TOKENS)
        return lambda i: chunked(layer, given, i), reference
    run = {
        "fused_experts": case.fused_experts,
        "FusedMoE": case.fused_moe,
        "backend": case.backend,
    }[entry]
    if entry == "backend":
        wide = [ids.long() for ids in given.ids]

        def reference(i: int) -> Any:  # the same ids as the module gets
            return exact(given.hidden, topk_ids=wide[i], topk_weights=given.weights[i])

        given = dataclasses.replace(given, ids=wide)
    return lambda i: run(given, i), reference


def _gated(case: Case, gate: torch.Tensor, tokens: int, router: dict[str, str]) -> Any:
    spec = conclave.MoeSpec(
        top_k=case.sizes.top_k, router=conclave.RouterSpec(**router), has_gate=True
    )
    return conclave.Layer.from_tensors(
        spec,
        gate_up=case.w1,
        down=case.w2,
        router=gate,
        options=conclave.LayerOptions(max_tokens=tokens),
    )
