"""vLLM's Triton experts without vLLM: the functions of its fused_moe.py that are needed, by name, from a copy of it."""

import ast
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import tempfile

import torch

from ..plugin import Missing

FUNCTIONS = ("write_zeros_to_output", "fused_moe_kernel", "invoke_fused_moe_triton_kernel", "get_default_config")
HEAD = """\
from typing import Any
import functools, os, json
import torch
import triton
import triton.language as tl


class envs:
    VLLM_BATCH_INVARIANT = False


class current_platform:
    @staticmethod
    def is_rocm():
        return False


def enable_swap_ab(BLOCK_SIZE_M, BLOCK_SIZE_N):
    return torch.cuda.get_device_capability()[0] == 9 and BLOCK_SIZE_M < 64 and BLOCK_SIZE_N >= 64


"""


def find_source() -> pathlib.Path:
    """fused_moe.py below PAIRED_VLLM: a checkout, a site-packages folder or a folder with that file."""
    root = os.environ.get("PAIRED_VLLM")
    if not root:
        found = importlib.util.find_spec("vllm")
        if found is None or not found.submodule_search_locations:
            raise Missing("vLLM is not installed, and PAIRED_VLLM names no copy of its sources")
        root = next(iter(found.submodule_search_locations))
    inside = ("", "model_executor/layers/fused_moe", "vllm/model_executor/layers/fused_moe")
    for folder in inside:
        path = pathlib.Path(root) / folder / "fused_moe.py"
        if path.is_file():
            return path
    raise Missing(f"no fused_moe.py below PAIRED_VLLM={root}")


def cut_functions(source: str, names: tuple) -> str:
    """The text of top-level functions with their decorators, in the order of the source."""
    lines = source.splitlines(keepends=True)
    found, parts = [], []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            begin = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            parts.append("".join(lines[begin - 1 : node.end_lineno]))
            found.append(node.name)
    absent = [name for name in names if name not in found]
    if absent:
        raise Missing(f"fused_moe.py has no function {', '.join(absent)}: another version of vLLM?")
    return "\n\n".join(parts) + "\n"


@functools.cache
def load():
    """A module of those functions. Triton reads a kernel's source, so it needs a file."""
    text = HEAD + cut_functions(find_source().read_text(encoding="utf-8"), FUNCTIONS)
    # The name is fixed, so that Triton's cache serves later processes.
    path = pathlib.Path(tempfile.gettempdir()) / f"paired_vllm_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shipped_config(case, tokens: int) -> dict | None:
    """What vLLM ships for these sizes on an H200 or H100, as it looks it up; None where it ships nothing."""
    device = torch.cuda.get_device_name().replace(" ", "_")
    device = "NVIDIA_H200" if "H200" in device.split("_") else device
    selector = ",dtype=fp8_w8a8,block_shape=[128,128]" if case.format == "e4m3" else ""
    path = find_source().parent / "configs" / f"E={case.experts},N={case.inner},device_name={device}{selector}.json"
    if not path.is_file():
        return None
    table = json.loads(path.read_text(encoding="utf-8"))
    table.pop("triton_version", None)
    return table[min(table, key=lambda key: abs(int(key) - tokens))]
