#!/usr/bin/env python3
"""Remakes bundled checkpoints with tools/make_checkpoints.py and compares them with the committed ones.

Exits with 77, which ctest reports as skipped, where the pinned packages are not installed.
"""

import importlib.metadata
import pathlib
import shutil
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 77


def missing_packages() -> list[str]:
    problems = []
    for line in (ROOT / "tools/requirements-checkpoints.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        name, version = line.split("==")
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{name} {version} is not installed")
            continue
        if found.split("+")[0] != version:
            problems.append(f"{name} is {found}, wanted {version}")
    return problems


class CheckTest(unittest.TestCase):
    """Each checkpoint against its recipe, and proof that a changed one is noticed."""

    def test_committed_checkpoint_matches_its_recipe(self):
        for name in make_checkpoints.RECIPES:
            with self.subTest(name=name):
                self.assertEqual(make_checkpoints.check(name), [])

    def test_changed_weight_is_reported(self):
        problems = self.check_after(lambda folder: flip_last_byte(folder / "model.safetensors"))
        self.assertTrue(any("model.safetensors: bytes differ" in problem for problem in problems), problems)

    def test_changed_reference_output_is_reported(self):
        problems = self.check_after(scale_first_output)
        self.assertTrue(any("float64 differs" in problem for problem in problems), problems)

    def test_missing_file_is_reported(self):
        problems = self.check_after(lambda folder: (folder / "generation_config.json").unlink())
        self.assertTrue(any("generation_config.json" in problem for problem in problems), problems)

    def check_after(self, damage) -> list[str]:
        committed = make_checkpoints.TESTDATA
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch) / "olmoe-tiny"
            shutil.copytree(committed / folder.name, folder)
            damage(folder)
            make_checkpoints.TESTDATA = pathlib.Path(scratch)
            try:
                return make_checkpoints.check(folder.name)
            finally:
                make_checkpoints.TESTDATA = committed


def flip_last_byte(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def scale_first_output(folder: pathlib.Path) -> None:
    path = folder / "reference.safetensors"
    provenance = make_checkpoints.read_provenance(path)
    tensors = make_checkpoints.load_file(path)
    tensors["layers.0.output"] *= 1.0 + 1e-9
    make_checkpoints.save(path, tensors, provenance)


if __name__ == "__main__":
    problems = missing_packages()
    if problems:
        print("skipped: " + "; ".join(problems))
        sys.exit(SKIPPED)
    sys.path.insert(0, str(ROOT / "tools"))
    import make_checkpoints

    make_checkpoints.configure()
    unittest.main()
