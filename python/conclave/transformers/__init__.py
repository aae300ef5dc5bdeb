"""Conclave inside transformers: an experts backend, and whole MoE blocks.

>>> import conclave.transformers
>>> model = AutoModelForCausalLM.from_pretrained(directory, experts_implementation="conclave")

The import registers the backend ``"conclave"`` for plain and for float8 experts. `patch` goes
further and replaces whole MoE blocks of a loaded model, routing and shared experts included.
`backend_report` tells which modules either of them ran, and why not others; `balancer_of` moves
experts between ranks as their load changes, `refit` brings new weights while a
model serves. See docs/python-transformers.md.
"""

from __future__ import annotations

from conclave.transformers import _block, _experts
from conclave.transformers._balancer import ModelBalancer
from conclave.transformers._eplb import EplbOptions
from conclave.transformers._experts import experts_forward
from conclave.transformers._mapping import get_expert_mapping
from conclave.transformers._packed import forget
from conclave.transformers._patch import (
    PatchedModule,
    PatchReport,
    balancer_of,
    patch,
    unpatch,
)
from conclave.transformers._recording import RecordedRouting, record_routing, replay_routing
from conclave.transformers._refit import ModelRefit, refit, refit_epoch
from conclave.transformers._register import IMPLEMENTATION, register, set_implementation
from conclave.transformers._report import BackendReport, ExpertsCalls, backend_report

_experts.define_operator()
_block.define_operator()
register()

__all__ = [
    "IMPLEMENTATION",
    "BackendReport",
    "EplbOptions",
    "ExpertsCalls",
    "ModelBalancer",
    "ModelRefit",
    "PatchReport",
    "PatchedModule",
    "RecordedRouting",
    "backend_report",
    "balancer_of",
    "experts_forward",
    "forget",
    "get_expert_mapping",
    "patch",
    "record_routing",
    "refit",
    "refit_epoch",
    "register",
    "replay_routing",
    "set_implementation",
    "unpatch",
]
