"""Models that the tool writes: random ones, and what it converts them to."""

from __future__ import annotations

import pathlib
import subprocess
import sys


def synth(out: pathlib.Path, *sizes: str) -> pathlib.Path:
    command = [sys.executable, "-m", "conclave", "synth", *sizes, str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return out


def convert(
    source: pathlib.Path, out: pathlib.Path, form: str, scales: str = "amax"
) -> pathlib.Path:
    command = [sys.executable, "-m", "conclave", "convert", str(source), str(out)]
    options = ["--format", form, "--scales", scales, "--tokens", "4"]
    subprocess.run([*command, *options], check=True, capture_output=True)
    return out
