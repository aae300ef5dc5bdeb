"""How a layer of experts computes: by its quantisation method, alone or over groups of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError
from conclave.vllm._rank_tokens import check_own_tokens
from conclave.vllm.engine.context import tokens_across_dp_of_forward
from conclave.vllm.parallel import FusedMoEConfig
from conclave.vllm.quant import FusedMoEQuantConfig
from conclave.vllm.quant_method.base import FusedMoEMethodBase
from conclave.vllm.quant_method.call import MethodCall, takes_whole_size
from conclave.vllm.quant_method.choose import check_eplb, checked_method
from conclave.vllm.quant_method.modular import FusedMoEModularMethod
from conclave.vllm.quant_method.own import SchemeFusedMoEMethod, UnquantizedFusedMoEMethod
from conclave.vllm.routed import RoutedLayer
from conclave.vllm.router.zero_experts import ZeroExpertRouter
from conclave.vllm.runner import MoERunner


class ComputingLayer(RoutedLayer):
    """Experts with the method that owns their parameters."""

    moe_config: FusedMoEConfig
    quant_method: FusedMoEMethodBase
    runner: MoERunner
    _call: MethodCall
    _output_scale: float

    def _take_method(self, method: FusedMoEMethodBase) -> None:
        check_eplb(method, self.enable_eplb)
        call = MethodCall.of(method)
        if call.routes:
            self._check_routing_method(type(method).__name__)
        self.quant_method, self._call = method, call
        self._is_ours = type(method) in (UnquantizedFusedMoEMethod, SchemeFusedMoEMethod)
        self.runner = self._init_runner()

    def _make_parameters(self, intermediate_size: int) -> None:
        sizes: dict[str, Any] = {
            "num_experts": self.local_num_experts,
            "hidden_size": self.hidden_size,
            "intermediate_size_per_partition": self.intermediate_size_per_partition,
            "params_dtype": self.params_dtype,
            "weight_loader": self.weight_loader,
            "global_num_experts": self.global_num_experts,
        }
        if takes_whole_size(self.quant_method):
            sizes["intermediate_size_full"] = intermediate_size
        self.quant_method.create_weights(layer=self, **sizes)

    def _check_routing_method(self, name: str) -> None:
        """A method that chooses experts itself sees neither what moves nor what returns tokens."""
        if self._groups is not None and self._groups.moves_tokens:
            raise ConclaveUnsupportedError(
                f"quant_method: {name} chooses experts by logits, which do not travel with tokens "
                "over dp_group, pcp_group or ep_group; take topk_ids"
            )
        if isinstance(self._router, ZeroExpertRouter):
            raise ConclaveUnsupportedError(
                f"zero_expert_type: {name} chooses experts by logits and knows no zero experts; "
                "take topk_ids"
            )

    def _init_runner(self) -> MoERunner:
        return MoERunner(self)

    def _replace_quant_method(self, mk: FusedMoEMethodBase) -> None:
        """Computes with another method from now on; parameters stay as they are."""
        if checked_method(mk, "_replace_quant_method") is None:
            raise ConclaveTypeError("quant_method: expected a FusedMoEMethodBase, found None")
        self._take_method(mk)

    @property
    def _quant_method(self) -> FusedMoEMethodBase:
        """quant_method, as vLLM's runner calls it."""
        return self.quant_method

    @property
    def base_quant_method(self) -> FusedMoEMethodBase:
        """The method that made the parameters, whatever has taken its place."""
        method = self.quant_method
        while isinstance(method, FusedMoEModularMethod):
            method = method.old_quant_method
        return method

    def ensure_moe_quant_config_init(self) -> None:
        """Asks the method for its configuration, once weights are loaded; the first one stays."""
        if self.quant_method.moe_quant_config is None:
            method = self.quant_method
            method.moe_quant_config = method.get_fused_moe_quant_config(self)

    @property
    def moe_quant_config(self) -> FusedMoEQuantConfig | None:
        """Scales and biases as `fused_experts` takes them: those of now where the library's
        method has the parameters, of a method of your own those of the first time. Of several
        tensor-parallel ranks the first adds the bias of w2. None where a method of checkpoints
        packs the experts."""
        if isinstance(self.quant_method, UnquantizedFusedMoEMethod):
            return self.quant_method.get_fused_moe_quant_config(self)
        self.ensure_moe_quant_config_init()
        return self.quant_method.moe_quant_config

    def maybe_init_modular_kernel(self) -> None:
        """Makes a modular kernel where the method has a way to move tokens
        (`maybe_make_prepare_finalize`), and computes with it from now on. Once weights are
        processed."""
        method = self.quant_method
        if method.supports_internal_mk or method.is_monolithic:
            return
        self.ensure_moe_quant_config_init()
        tables = self._maybe_init_expert_routing_tables()
        mover = method.maybe_make_prepare_finalize(routing_tables=tables)
        if mover is not None:
            inplace = method.allow_inplace and not self.moe_config.disable_inplace
            self._replace_quant_method(
                FusedMoEModularMethod.make(self, method, mover, inplace=inplace)
            )

    def _routed_sum(
        self,
        hidden: torch.Tensor,
        routed: torch.Tensor,
        logits: torch.Tensor,
        input_ids: torch.Tensor | None,
        num_tokens: int | torch.Tensor | None,
        mask: torch.Tensor | None,
        rank_tokens: Sequence[int] | torch.Tensor | None,
        wide: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scaled sum [T, H] of the rows `routed`, chosen by rows `hidden`: of routed's type,
        or float32 where something is to join it. Beside it, with zero experts, the weight [T, 1]
        of each token's own row."""
        if self._call.routes:
            given = {"num_tokens": num_tokens, "padding_mask": mask, "rank_tokens": rank_tokens}
            for name in (name for name, value in given.items() if value is not None):
                raise ConclaveUnsupportedError(
                    f"{name}: {type(self.quant_method).__name__} chooses experts itself"
                )
            out = self._call.run(
                self.quant_method, self, routed, None, router_logits=logits, input_ids=input_ids
            )
            return self._scaled(out, routed.dtype, wide), None
        if self._groups is None and rank_tokens is not None:
            check_own_tokens(self.moe_parallel_config, rank_tokens, len(routed))
        indices = self.quant_method.topk_indices_dtype
        weights, ids, share = self._select(hidden, logits, input_ids, indices, num_tokens, mask)
        if self._groups is not None:
            if rank_tokens is None:
                rank_tokens = self._groups.tokens_across_dp(tokens_across_dp_of_forward())
            out = self._groups.run(routed, weights, ids, self._wide_sum, rank_tokens)
        elif wide or self._output_scale != 1.0:
            out = self._wide_sum(routed, weights, ids)
        else:
            out = self._weighted_sum(routed, weights, ids, None)
        return self._scaled(out, routed.dtype, wide), share

    def _scaled(self, out: torch.Tensor, dtype: torch.dtype, wide: bool) -> torch.Tensor:
        if self._output_scale != 1.0:
            out = out.float() * self._output_scale
        wanted = torch.float32 if wide else dtype
        return out if out.dtype == wanted else out.to(wanted)

    def _wide_sum(
        self, rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        return self._weighted_sum(rows, weights, ids, out)

    def _weighted_sum(
        self,
        rows: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """What this rank's experts make of rows [T, H]."""
        if self._is_ours:  # its names are known
            ours: Any = self.quant_method
            found: torch.Tensor = ours.apply(self, rows, weights, ids, out)
            return found
        return self._call.run(
            self.quant_method, self, rows, out, topk_weights=weights, topk_ids=ids
        )
