"""What a layer of experts says of itself, and how it is found again."""

from __future__ import annotations

import logging
from typing import Any

import torch

from conclave.vllm._registry import log_once, logger, static_forward_context
from conclave.vllm.computing import ComputingLayer


class NamedLayer(ComputingLayer):
    """A layer that is found by its name, and by compiled graphs by its number."""

    def _enter(self) -> None:
        """Names and numbers a layer that is whole, and logs what it holds."""
        static_forward_context.add(self.layer_name, self)
        self._take_number()
        if self.use_ep:
            log_once(
                logging.INFO,
                f"[EP Rank {self.ep_rank}/{self.ep_size}] Expert parallelism is enabled. Expert "
                f"placement strategy: {self.expert_placement_strategy}. Local/global number of "
                f"experts: {self.local_num_experts}/{self.global_num_experts}. Experts local to "
                f"global index map: {self._experts.compressed()}.",
            )
        logger.debug("FusedMoEConfig = %s", self.moe_config)

    def _take_number(self) -> None:
        self._number = static_forward_context.number(self)
        self._handle = torch.tensor(self._number, device="cpu")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is a layer of its own."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._take_number()
