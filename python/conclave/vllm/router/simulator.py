"""Routing without meaning, by the name of a strategy, to measure speed."""

from __future__ import annotations

import abc
import logging
from typing import Any

import torch

from conclave.errors import ConclaveTypeError, ConclaveValueError
from conclave.routing import RoutingMethodType
from conclave.vllm.router.base import BaseRouter, Pair, checked_routing

_logger = logging.getLogger("conclave.vllm")


class RoutingStrategy(abc.ABC):
    """Chooses experts without looking at what tokens say."""

    @abc.abstractmethod
    def route_tokens(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> Any:
        """Weights [T, k] and ids [T, k] in [0, columns of router_logits)."""


class DistributionBasedRouting(RoutingStrategy):
    """Ids and weights drawn from torch's generator of the device.

    Args:
        distribution: "uniform": every expert as likely, repeats possible, weights of 1. "normal":
            ids floor(sigmoid(x) E), weights |y| over their sum, of normal x and y.
        distribution_params: mean and std of the normal one.
    """

    def __init__(self, distribution: str = "uniform", **distribution_params: Any) -> None:
        self.distribution = distribution.lower()
        if self.distribution not in ("uniform", "normal"):
            raise ConclaveValueError(
                f"distribution: expected uniform or normal, found {distribution!r}"
            )
        unknown = set(distribution_params) - {"mean", "std"}
        if unknown:
            raise ConclaveValueError(
                f"distribution_params: expected mean and std, found {', '.join(sorted(unknown))}"
            )
        self.distribution_params = {"mean": 0.0, "std": 1.0, **distribution_params}
        if not self.distribution_params["std"] >= 0:
            raise ConclaveValueError(
                f"std: expected 0 or more, found {self.distribution_params['std']}"
            )

    def get_distribution_info(self) -> dict[str, Any]:
        """The name, and the parameters of the distribution."""
        given = dict(self.distribution_params) if self.distribution == "normal" else {}
        return {"distribution": self.distribution, "parameters": given}

    def route_tokens(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> Pair:
        shape, device = (len(hidden_states), top_k), hidden_states.device
        experts, kind = router_logits.shape[-1], indices_type or torch.int64
        if self.distribution == "uniform":
            ids = torch.randint(0, experts, shape, dtype=kind, device=device)
            return torch.ones(shape, dtype=torch.float32, device=device), ids
        ids = (torch.sigmoid(self._drawn(shape, device)) * experts).long().clamp(0, experts - 1)
        weights = self._drawn(shape, device).abs()
        total = weights.sum(dim=-1, keepdim=True)
        return torch.where(total > 0, weights / total, 1.0 / top_k), ids.to(kind)

    def _drawn(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        mean, std = self.distribution_params["mean"], self.distribution_params["std"]
        drawn = torch.randn(shape, dtype=torch.float32, device=device)
        return drawn.mul_(std).add_(mean)


class RoutingSimulator:
    """Strategies by name. `uniform_random` and `normal_routing` are there."""

    _strategies: dict[str, RoutingStrategy] = {  # noqa: RUF012
        "uniform_random": DistributionBasedRouting("uniform"),
        "normal_routing": DistributionBasedRouting("normal"),
    }
    _warned: set[str] = set()  # noqa: RUF012

    @classmethod
    def register_strategy(cls, name: str, strategy: RoutingStrategy) -> None:
        """Makes a strategy known for the process; one of the same name is replaced."""
        if not isinstance(strategy, RoutingStrategy):
            raise ConclaveTypeError(
                f"strategy: expected a RoutingStrategy, found {type(strategy).__name__}"
            )
        if not name:
            raise ConclaveValueError("name: expected a name, found an empty one")
        cls._strategies[name] = strategy

    @classmethod
    def get_available_strategies(cls) -> list[str]:
        """The names, in the order of registration."""
        return list(cls._strategies)

    @classmethod
    def strategy(cls, name: str) -> RoutingStrategy:
        """The strategy of a name. Raises ConclaveValueError with the names there are."""
        if name not in cls._strategies:
            raise ConclaveValueError(
                f"strategy_name: Unknown routing strategy: {name}. Available strategies: "
                f"{', '.join(cls._strategies)}"
            )
        return cls._strategies[name]

    @classmethod
    def simulate_routing(
        cls,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        strategy_name: str,
        top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> Pair:
        """Weights and ids of a strategy, checked. The first call by a name warns in the log."""
        strategy = cls.strategy(strategy_name)
        if strategy_name not in cls._warned:
            cls._warned.add(strategy_name)
            _logger.warning(
                "Routing is simulated by the strategy %s, to measure speed: results mean nothing.",
                strategy_name,
            )
        found = strategy.route_tokens(
            hidden_states=hidden_states,
            router_logits=router_logits,
            top_k=top_k,
            indices_type=indices_type,
        )
        return checked_routing(found, len(hidden_states), strategy_name)


class RoutingSimulatorRouter(BaseRouter):
    """Routes by a strategy's name.

    Args:
        strategy_name: one that `RoutingSimulator` knows.
        num_logical_experts: of the columns of logits the first so many are experts; by default all.
    """

    def __init__(
        self,
        top_k: int,
        global_num_experts: int,
        *,
        strategy_name: str = "uniform_random",
        num_logical_experts: int | None = None,
        **of_base: Any,
    ) -> None:
        super().__init__(top_k, global_num_experts, **of_base)
        RoutingSimulator.strategy(strategy_name)
        self.strategy_name = strategy_name
        self.num_logical_experts = num_logical_experts

    @property
    def routing_method_type(self) -> RoutingMethodType:
        return RoutingMethodType.Simulated

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> Pair:
        return RoutingSimulator.simulate_routing(
            hidden_states,
            router_logits[:, : self.num_logical_experts],
            self.strategy_name,
            self.top_k,
            indices_type,
        )
