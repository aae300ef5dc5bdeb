"""The layer as newest vLLM makes it: a runner, and the owner of the experts' parameters in it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

import torch

from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm._registry import static_forward_context
from conclave.vllm.activation import parse_activation
from conclave.vllm.engine.calls import fused_moe_make_expert_params_mapping
from conclave.vllm.engine.routed_experts import RoutedExperts
from conclave.vllm.layer import FusedMoE

# Each says what a layer here does anyway, whatever the value.
_WITHOUT_EFFECT = ("intermediate_pad", "shared_expert_prefix", "skip_padding")
# Each says nothing where it is None, False or 0, and else something that does not run here.
_REFUSED = (
    *("swiglu_alpha", "swiglu_beta", "activation_situ_beta", "activation_situ_linear_beta"),
    *("fuse_shared_experts", "bias_vl", "image_sentinel_lo", "moe_config_cls"),
)
_AXES = ("tp", "dp", "pcp")


class MoERunner(torch.nn.Module):
    """Calls a `FusedMoE`, which is its child `routed_experts`, and has its attributes."""

    def __init__(self, routed_experts: FusedMoE) -> None:
        super().__init__()
        self.routed_experts = routed_experts

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> Any:
        """As `FusedMoE.forward`. shared_experts_input: other rows for the shared experts; refused
        where there are some."""
        if shared_experts_input is not None and self.routed_experts.shared_experts is not None:
            raise ConclaveUnsupportedError(
                "shared_experts_input: shared experts read hidden_states; give the layer "
                "routed_input_transform, which the routed ones alone see"
            )
        return self.routed_experts(hidden_states, router_logits, input_ids)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """As `FusedMoE.load_weights`; names that it returns begin with "routed_experts."."""
        own = "routed_experts."
        plain = ((name.removeprefix(own), tensor) for name, tensor in weights)
        return [f"{own}{name}" for name in self.routed_experts.load_weights(plain)]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "routed_experts":
                raise
            return getattr(self.routed_experts, name)


def FusedMoEFactory(
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    prefix: str = "",
    activation: str = "silu",
    num_redundant_experts: int = 0,
    reduce_results: bool = True,
    ckpt_names: tuple[str, str, str | None] = ("gate_proj", "down_proj", "up_proj"),
    is_fused_checkpoint_transposed: bool = False,
    tp_size: int | None = None,
    dp_size: int | None = None,
    pcp_size: int | None = None,
    runner_cls: type[MoERunner] | None = None,
    runner_args: dict[str, Any] | None = None,
    routed_experts_cls: type[FusedMoE] | None = None,
    routed_experts_args: dict[str, Any] | None = None,
    **options: Any,
) -> MoERunner:
    """A runner by the keywords of newest vLLM's factory, split as the engine's configuration and
    groups say (`vllm.config`, `vllm.distributed`).

    Args:
        ckpt_names: names of gate, down and up in a checkpoint; None: there is no up.
        is_fused_checkpoint_transposed: tensors of all experts are stored [E, in, out].
        runner_cls, routed_experts_cls: classes that derive from `MoERunner` and `RoutedExperts`;
            runner_args and routed_experts_args go to their constructors.
        options: keywords of `FusedMoE`.

    Raises:
        ConclaveUnsupportedError: for a keyword of vLLM's that has no meaning here, unless it has
            no effect there either. Other errors as of `FusedMoE`.
    """
    engine = importlib.import_module("vllm.config").get_current_vllm_config()
    gated = parse_activation(activation).is_gated and options.get("is_act_and_mul", True)
    _check_names(ckpt_names, gated)
    owner = _class_of("routed_experts_cls", routed_experts_cls, RoutedExperts)
    with static_forward_context.paused():  # names are those of one engine's configuration
        layer = owner(
            num_experts,
            top_k,
            hidden_size,
            intermediate_size,
            prefix=prefix,
            activation=activation,
            num_redundant_experts=num_redundant_experts,
            reduce_results=reduce_results,
            expert_mapping=fused_moe_make_expert_params_mapping(
                None, *ckpt_names, num_experts, num_redundant_experts, ""
            ),
            **_split(engine, {"tp": tp_size, "dp": dp_size, "pcp": pcp_size}),
            **_known(options),
            **(routed_experts_args or {}),
        )
    layer.is_fused_checkpoint_transposed = is_fused_checkpoint_transposed
    runner = _class_of("runner_cls", runner_cls, MoERunner)(layer, **(runner_args or {}))
    _register(engine, prefix, runner)
    return runner


def _check_names(names: tuple[str, str, str | None], gated: bool) -> None:
    if len(names) != 3 or not names[0] or not names[1]:
        raise ConclaveValueError(f"ckpt_names: expected names of gate, down and up, found {names}")
    if gated == (names[2] is None):
        raise ConclaveValueError(
            f"ckpt_names: expected {'a name' if gated else 'None'} for the up projection, "
            f"found {names[2]!r}"
        )


def _class_of(argument: str, given: Any, base: Any) -> Any:
    if given is None:
        return base
    if not (isinstance(given, type) and issubclass(given, base)):
        raise ConclaveTypeError(
            f"{argument}: expected a class that derives from conclave.vllm's {base.__name__}, "
            f"found {given!r}"
        )
    return given


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Keywords that the layer has. Others are dropped where they say nothing."""
    taken = inspect.signature(FusedMoE.__init__).parameters
    found = {}
    for name, value in options.items():
        if name in taken:
            found[name] = value
        elif name in _REFUSED:
            if not (value is None or (isinstance(value, (bool, int, float)) and value == 0)):
                raise ConclaveUnsupportedError(f"{name}: does not run here, found {value!r}")
        elif name not in _WITHOUT_EFFECT:
            raise ConclaveTypeError(f"{name}: neither vLLM's factory nor this one has it")
    return found


def _split(engine: Any, sizes: dict[str, int | None]) -> dict[str, Any]:
    """Groups and sizes of a layer: those of the engine, unless a size says one rank."""
    ranks = importlib.import_module("vllm.distributed")
    parallel = engine.parallel_config
    found: dict[str, Any] = {
        "expert_placement_strategy": getattr(parallel, "expert_placement_strategy", "linear")
    }
    world = 1
    for axis in _AXES:
        group, size = getattr(ranks, f"get_{axis}_group")(), sizes[axis]
        size = group.world_size if size is None else size
        if size == group.world_size and size > 1:
            found[f"{axis}_group"] = group
        elif size > 1:
            found[f"{axis}_size"] = size
        world *= size
    if world > 1 and parallel.enable_expert_parallel:
        found["ep_group"] = ranks.get_ep_group()
    return found


def _register(engine: Any, prefix: str, runner: MoERunner) -> None:
    """Keeps the runner where vLLM's engine looks layers up by name."""
    if not prefix:
        return
    compiled = engine.compilation_config
    if prefix in compiled.static_forward_context:
        raise ConclaveValueError(f"prefix: Duplicate layer name: {prefix}")
    compiled.static_forward_context[prefix] = runner
    compiled.static_all_moe_layers.append(prefix)
