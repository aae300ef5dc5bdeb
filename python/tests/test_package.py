"""The package itself: what it imports, its tool, its types."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

import conclave

PACKAGE = pathlib.Path(conclave.__file__).parent
PROJECT = pathlib.Path(__file__).resolve().parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,  # mypy reads all of the package and of numpy without a cache
    )


def test_import_brings_nothing_heavy():
    code = (
        "import sys, conclave; "
        "print(*sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    done = run("-c", code)
    assert done.stdout.strip() == "" and done.returncode == 0, done.stderr


def test_one_library_holds_every_instruction_set():
    assert "avx2" in conclave._conclave.build_info()["features"]
    plan = conclave._conclave.make_plan(
        conclave._runtime.context("cpu"),
        {"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 64},
        {},
        {},
    )
    kernels = {row["name"] for row in plan["rows"] if row["table"] == "kernel"}
    assert {"cpu.amx", "cpu.avx512", "cpu.avx2", "cpu.reference"} <= kernels


def test_version_is_the_librarys():
    assert conclave.__version__ == conclave._conclave.build_info()["version"]
    for name in conclave.__all__:
        assert hasattr(conclave, name), name


def test_distribution_is_the_projects():
    """The import's name on PyPI is another package's."""
    project = (PROJECT / "pyproject.toml").read_text().partition("[project]")[2]
    name = re.search(r'^name = "(.+)"$', project, re.MULTILINE)
    assert name is not None and conclave.DISTRIBUTION == name[1] == "conclave-moe"


def test_installed_metadata_has_the_reported_name():
    installed = importlib.metadata.packages_distributions().get("conclave")
    if not installed:
        pytest.skip("the package is not installed: it is imported from a build folder")
    assert installed == [conclave.DISTRIBUTION]
    found = importlib.metadata.distribution(conclave.DISTRIBUTION)
    assert found.metadata["Name"] == conclave.DISTRIBUTION
    assert found.version == conclave.__version__


def test_every_public_object_has_a_docstring():
    for name in conclave.__all__:
        found = getattr(conclave, name)
        assert found.__doc__, name
        if isinstance(found, type) and found.__module__.startswith("conclave"):
            for method, value in vars(found).items():
                if callable(value) and not method.startswith("_"):
                    assert value.__doc__, f"{name}.{method}"


def test_module_is_the_tool(testdata):
    done = run("-m", "conclave", "inspect", str(testdata / "mixtral-tiny"))
    assert done.returncode == 0 and "mixtral" in done.stdout
    assert run("-m", "conclave", "--version").stdout.startswith(f"conclave {conclave.__version__}")
    done = run("-m", "conclave", "inspect", "/does/not/exist")
    assert done.returncode not in (0, 1) and "kFileNotFound" in done.stderr
    done = run("-m", "conclave", "doctor", "--help")
    assert done.returncode == 0 and "doctor" in done.stdout


def test_tool_runs_a_model(testdata):
    model = testdata / "qwen2-moe-tiny"
    done = run(
        "-m",
        "conclave",
        "run",
        str(model),
        "--input",
        str(model / "reference.safetensors"),
        "--reference",
        str(model / "reference.safetensors"),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_types_are_installed():
    assert (PACKAGE / "py.typed").is_file()
    stub = (PACKAGE / "_conclave.pyi").read_text()
    for name in ("class Layer", "class Router", "class Checkpoint", "def align_block_size"):
        assert name in stub


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_types_are_consistent(tmp_path):
    use = tmp_path / "use.py"
    use.write_text(
        "import conclave\n"
        "layer: conclave.Layer = conclave.Layer.from_checkpoint('x', 0)\n"
        "load: tuple[int, ...] | None = layer.stats().expert_load\n"
        "experts: int = conclave.inspect('x').layers[0].spec.num_experts\n"
        "conclave.fused_topk(None, None, '4', True)\n"
    )
    wrong = {"use.py:5"}
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        # These calls need nothing of that which pyproject.toml has mypy leave out.
        use.write_text(
            use.read_text() + "import torch\n"
            "from transformers import PreTrainedModel\n"
            "torch.empty(2, device=[])\n"
            "torch.nn.functional.silu('x')\n"
            "torch.zeros(2).index_select('x', torch.zeros(2))\n"
            "torch.library.register_fake(3)\n"
            "torch.distributed.get_rank('x')\n"
            "def save(model: PreTrainedModel) -> int:\n"
            "    return model.get_input_embeddings(3)\n"
        )
        wrong |= {f"use.py:{line}" for line in (8, 9, 10, 11, 12, 14)}
    # Both at once, since most of the time is that of reading what they import.
    settings = ("--config-file", str(PROJECT / "pyproject.toml"), "--cache-dir", str(tmp_path))
    mypy = ("-m", "mypy", "--ignore-missing-imports", *settings)
    done = run(*mypy, "-m", "use", "-p", "conclave", MYPYPATH=str(tmp_path))
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    found = {re.sub(r"^.*(use\.py:\d+):.*$", r"\1", line) for line in errors}
    assert found == wrong, done.stdout + done.stderr
