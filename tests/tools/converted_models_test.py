#!/usr/bin/env python3
"""Decompresses what `conclave convert` wrote with the package compressed-tensors, and compares the values
with the original weights and with the errors that conversion.json states.

    converted_models_test.py TOOL

Exits with 77, which ctest reports as skipped, where the packages are not installed.
"""

import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 77
TOOL = ""
# Bundled models, and one that the tool makes, whose rows are whole words and groups.
CASES = [
    ("mixtral-tiny", "int8-channel"),
    ("mixtral-tiny", "int8-token"),
    ("mixtral-tiny", "fp8-channel"),
    ("olmoe-tiny", "fp8-channel"),
    ("qwen2-moe-tiny", "int8-channel"),
    ("synth", "int4-group32"),
    ("synth", "int4-group64"),
    ("synth", "int4-group128"),
]


def tensors_of(directory: pathlib.Path) -> dict:
    from safetensors.torch import load_file

    index = directory / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(json.loads(index.read_text())["weight_map"].values())
    return {name: tensor for file in sorted(files) for name, tensor in load_file(directory / file).items()}


class Converted(unittest.TestCase):
    def source(self, model: str, scratch: pathlib.Path) -> pathlib.Path:
        if model != "synth":
            return ROOT / "testdata" / model
        sizes = ["-E", "3", "-k", "1", "-H", "256", "-I", "128"]
        subprocess.run([TOOL, "synth", *sizes, scratch / model], check=True, capture_output=True)
        return scratch / model

    def convert(self, source: pathlib.Path, form: str, out: pathlib.Path, *more: str) -> None:
        command = [TOOL, "convert", source, out, "--format", form, "--tokens", "0", *more]
        subprocess.run(command, check=True, capture_output=True)

    def decompressed(self, out: pathlib.Path) -> dict:
        """The weights of every module that the report lists, as the package makes them."""
        import torch
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig

        config = json.loads((out / "config.json").read_text())["quantization_config"]
        scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
        compressor = BaseCompressor.get_value_from_registry(config["format"])
        disk = tensors_of(out)
        weights = {}
        for module in json.loads((out / "conversion.json").read_text())["matrices"]:
            start = module["name"] + "."
            state = {name.removeprefix(start): t for name, t in disk.items() if name.startswith(start)}
            state["weight_scale"] = state["weight_scale"].to(torch.float64)
            weights[module["name"]] = (module, compressor.decompress(state, scheme)["weight"])
        return weights

    def test_package_reads_the_values_that_were_reported(self):
        import torch

        for model, form in CASES:
            with self.subTest(model=model, form=form), tempfile.TemporaryDirectory() as scratch:
                out = pathlib.Path(scratch) / "out"
                source = self.source(model, pathlib.Path(scratch))
                self.convert(source, form, out)
                original = tensors_of(source)
                for name, (module, weight) in self.decompressed(out).items():
                    before = original[f"{name}.weight"].to(torch.float64)
                    self.assertEqual(weight.shape, before.shape)
                    error = (weight.to(torch.float64) - before).norm() / before.norm()
                    self.assertAlmostEqual(float(error), module["relative_error"], delta=1e-6, msg=name)

    def test_ignored_modules_are_those_without_codes(self):
        with tempfile.TemporaryDirectory() as scratch:
            out = pathlib.Path(scratch) / "out"
            source = self.source("qwen2-moe-tiny", out)
            self.convert(source, "int8-channel", out, "--keep", "*.shared_expert.*=source")
            config = json.loads((out / "config.json").read_text())["quantization_config"]
            disk = tensors_of(out)
            scaled = {name.removesuffix(".weight_scale") for name in disk if name.endswith(".weight_scale")}
            linear = {
                name.removesuffix(".weight")
                for name, tensor in disk.items()
                if name.endswith(".weight") and tensor.dim() == 2
            }
            self.assertEqual(set(config["ignore"]), linear - scaled | {"lm_head"})


if __name__ == "__main__":
    lacking = [name for name in ("compressed_tensors", "safetensors", "torch") if not importlib.util.find_spec(name)]
    if lacking:
        print("not installed:", ", ".join(lacking))
        sys.exit(SKIPPED)
    TOOL = sys.argv.pop(1)
    unittest.main()
