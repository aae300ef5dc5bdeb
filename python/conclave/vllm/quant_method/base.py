"""The interface of quantisation methods, by vLLM's names."""

from __future__ import annotations

import abc
from typing import Any

import torch

from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm.parallel import FusedMoEConfig, FusedMoEParallelConfig
from conclave.vllm.quant import FusedMoEQuantConfig


class QuantizeMethodBase(abc.ABC):
    """Makes a module's parameters and computes with them."""

    @abc.abstractmethod
    def create_weights(self, layer: torch.nn.Module, *weight_args: Any, **attributes: Any) -> None:
        """Registers the parameters; attributes are for each of them."""

    def apply(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What the module computes."""
        raise ConclaveUnsupportedError(f"apply: {type(self).__name__} has none")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Called once all is loaded, by `process_weights_after_loading`."""
        del layer


class QuantizationConfig(abc.ABC):
    """What `FusedMoE(quant_config=...)` asks for a method. It need not be derived from: any object
    with get_quant_method does."""

    @abc.abstractmethod
    def get_name(self) -> str:
        """The method's name."""

    @abc.abstractmethod
    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer; None: this configuration has none of its own for it."""

    def is_mxfp4_quant(self, prefix: str, layer: torch.nn.Module) -> bool:
        """Whether hidden sizes are padded for mxfp4; nothing is padded here."""
        del prefix, layer
        return False


class FusedMoEMethodBase(QuantizeMethodBase):
    """A method for the experts of a `FusedMoE`.

    A layer calls `create_weights` once, when it is made, and `apply` in every forward. `apply` is
    given what it has names for, of: layer, x [T, H], topk_weights [T, k] float32, topk_ids [T, k],
    router_logits, input_ids, shared_experts and shared_experts_input (None: the layer runs these),
    global_num_experts, expert_map, activation, apply_router_weight_on_input, the arguments of
    routing (top_k, renormalize, scoring_func, ...), and out [T, H] float32 or None, to write to.
    One that asks for router_logits and not for topk_ids routes by `layer.select_experts`. It
    returns this rank's weighted sum [T, H].

    Args:
        moe: the layer's configuration.
    """

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__()
        self.moe = moe
        self.moe_quant_config: FusedMoEQuantConfig | None = None

    @abc.abstractmethod
    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers the parameters of num_experts experts of this rank, each with the attributes:
        weight_loader and global_num_experts."""

    @abc.abstractmethod
    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig | None:
        """Scales and biases, once they are loaded."""

    def apply_monolithic(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The weighted sum [T, H], routing included; called in place of `apply` if
        `is_monolithic`."""
        raise ConclaveUnsupportedError(f"apply_monolithic: {type(self).__name__} has none")

    def maybe_make_prepare_finalize(
        self, routing_tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    ) -> Any:
        """A `FusedMoEPrepareAndFinalize`, with which `maybe_init_modular_kernel` makes a kernel;
        None: there is nothing to move."""
        del routing_tables

    def select_gemm_impl(self, prepare_finalize: Any, layer: torch.nn.Module) -> Any:
        """The `FusedMoEPermuteExpertsUnpermute` that goes with a prepare_finalize."""
        raise ConclaveUnsupportedError(f"select_gemm_impl: {type(self).__name__} has none")

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: FusedMoEParallelConfig,
    ) -> tuple[int, int]:
        """The sizes as they are: packing pads inside."""
        del act_dtype, moe_parallel_config
        return hidden_size, intermediate_size_per_partition

    def after_eplb_rearrangement(self, layer: torch.nn.Module) -> None:
        """For what a method derives from parameters, once a balancer has moved these."""
        del layer

    def uses_weight_scale_2_pattern(self) -> bool:
        """Whether weight_scale_2 is the scale of a whole tensor."""
        return False

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        """The type of ids that `apply` takes; None: any."""
        return None

    @property
    def supports_eplb(self) -> bool:
        """Whether ids may be of physical experts."""
        return False

    @property
    def supports_internal_mk(self) -> bool:
        """Whether the method has a modular kernel already."""
        return False

    @property
    def is_monolithic(self) -> bool:
        """Whether the method routes, too."""
        return False

    @property
    def allow_inplace(self) -> bool:
        """Whether `apply` may write to x. A layer here gives rows that it needs afterwards."""
        return False

    @property
    def mk_owns_shared_expert(self) -> bool:
        """Whether shared experts run in the method; the layer runs them."""
        return False

    @property
    def skip_forward_padding(self) -> bool:
        """Rows are never padded."""
        return False

    @property
    def has_unpadded_output(self) -> bool:
        """Rows are never padded."""
        return False

    @property
    def method_name(self) -> str:
        """The class' name."""
        return type(self).__name__


def set_weight_attrs(weight: torch.Tensor, weight_attrs: dict[str, Any] | None) -> None:
    """Sets attributes that a parameter does not have yet.

    Raises ConclaveValueError for one that it has.
    """
    for name, value in (weight_attrs or {}).items():
        if hasattr(weight, name):
            raise ConclaveValueError(f"weight_attrs: the parameter has {name} already")
        setattr(weight, name, value)


def process_weights_after_loading(model: torch.nn.Module) -> None:
    """Calls the method of the same name of every module's `quant_method`, as an engine does after
    it has loaded a model's weights."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(module)
