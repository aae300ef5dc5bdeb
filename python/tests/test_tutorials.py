"""docs/tutorials: what the pages show runs as shown; the page of C++ is run by tests/install."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import sys

import numpy as np
import pytest

import conclave

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "tutorials"
OF_CPP = "embed-in-cpp"
# A page is skipped without these beside the package.
NEEDS = {
    "convert-and-check": (),
    "four-ranks": (),
    "serve-with-transformers": ("torch", "transformers"),
}


def load_runner():
    spec = importlib.util.spec_from_file_location("run_tutorial", ROOT / "tools/run_tutorial.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


if not PAGES.is_dir():  # an installed package has no pages
    pytest.skip("no pages beside this package", allow_module_level=True)
runner = load_runner()


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """`conclave` and `python` in PATH, as an installation of this package has them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, words in (("python", ""), ("conclave", "-m conclave ")):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
        (folder / name).chmod(0o755)
    package = pathlib.Path(conclave.__file__).resolve().parents[1]
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{package}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"))
    # Pages speak of the CPU, and ranks must not each take all cores.
    monkeypatch.setenv("CONCLAVE_DEVICE", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("CONCLAVE_ISA", raising=False)


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_a_page_does_what_it_shows(name, programs, tmp_path):
    for package in NEEDS[name]:
        pytest.importorskip(package, reason=f"{package} is not installed")
    transport = next(row for row in conclave.transports() if row.name == "mpi")
    if name == "four-ranks" and not (transport.usable and shutil.which("mpirun")):
        pytest.skip("this build has no MPI")
    folder = tmp_path / "work"
    folder.mkdir()
    runner.run_page((PAGES / f"{name}.md").read_text(encoding="utf-8"), folder)


def test_code_for_vllm_comes_in_three_ways(programs, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    page = (ROOT / "docs/coming-from-vllm.md").read_text(encoding="utf-8")
    section = page.split("## Three ways in one program\n")[1].split("\n## ")[0]
    folder = tmp_path / "work"
    folder.mkdir()
    assert len(runner.run_page(section, folder)) == 1


def test_the_first_page_does_what_it_shows(monkeypatch, capsys):
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [block.body for block in runner.blocks_of(page) if block.language == "python"]
    assert blocks
    monkeypatch.chdir(ROOT)
    for block in blocks:
        hidden = np.random.default_rng(1).standard_normal((5, 72), np.float32)
        names = {"hidden": hidden}
        exec(compile(block, "README.md", "exec"), names)
        assert names["out"].shape == hidden.shape and np.abs(names["out"]).sum() > 0
        assert "packed layout" in capsys.readouterr().out


def test_every_page_is_run():
    assert {page.stem for page in PAGES.glob("*.md")} == {*NEEDS, OF_CPP}


def test_only_what_needs_gpus_is_left_out():
    left_out = {
        (page.stem, block.body)
        for page in PAGES.glob("*.md")
        for block in runner.blocks_of(page.read_text(encoding="utf-8"))
        if block.title == runner.LEFT_OUT
    }
    command = "NCCL_NVLS_ENABLE=0 mpirun -n 4 python slices.py cuda\n"
    assert left_out == {("four-ranks", command)}
