#!/usr/bin/env python3
"""Runs files of a vLLM source tree on conclave.vllm.install, and prints what works.

Usage: python3 tools/vllm_drop_in TREE [--models] [--tests]

TREE holds vLLM's source, such as an unpacked source distribution; nothing of it is copied here.
--models makes tiny models of transformers, loads them into the tree's model files, whose MoE layers
are then ours, and compares logits. --tests runs the tree's own tests of fused MoE with pytest.
Without either, both. Needs torch, transformers, pytest and conclave.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import kernel_tests
import models
import standins

import conclave.vllm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=pathlib.Path)
    parser.add_argument("--models", action="store_true", help="only the model files")
    parser.add_argument("--tests", action="store_true", help="only the tests")
    parser.add_argument("--most", type=int, default=24, help="tests of one function that are run")
    parser.add_argument("--seconds", type=int, default=150, help="for one file of tests")
    parser.add_argument("--part", default="", help="of the names of files of tests to run")
    options = parser.parse_args()
    if not (options.tree / "vllm" / "model_executor").is_dir():
        parser.error(f"{options.tree} holds no vllm/model_executor")
    both = options.models == options.tests
    failed = 0
    if options.models or both:
        with conclave.vllm.install():
            standins.place(options.tree)
            print("| model | file | relative distance of logits |\n|---|---|---|")
            for model in models.MODELS:
                found = models.compare(model)
                failed += found.startswith("failed")
                print(f"| {model.name} | {model.file}.py | {found} |", flush=True)
    if options.tests or both:
        kernel_tests.report(options.tree, options.most, options.seconds, options.part)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
