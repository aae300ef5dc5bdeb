"""Plants known faults in the parsers, one at a time, and measures how long the fuzzers need.

Works in a copy of the tracked tree under build/planted; the sources stay as they are. A fault that
its harness does not find in the time given is an exit status of 1: the harness has gone blind.
"""

import argparse
import dataclasses
import pathlib
import shutil
import subprocess
import time

from .faults import ROOT

COPY = ROOT / "build" / "planted" / "fuzz"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One replacement in one file, and the harness that must notice."""

    name: str
    harness: str
    file: str
    old: str
    new: str


FAULTS = (
    Fault("tensors may overlap", "safetensors_header", "src/io/safetensors_header.cc",
          "      if (begin != end) {", "      if (begin > end) {"),
    Fault("the product of dimensions wraps", "safetensors_header", "src/io/safetensors_rules.cc",
          "if (dim != 0 && bits) bits = checked_mul(*bits, dim);",
          "if (dim != 0 && bits) bits = static_cast<int64_t>(static_cast<uint64_t>(*bits) * static_cast<uint64_t>(dim));"),
    Fault("a number at the end of the text is read past it", "safetensors_header", "src/io/json_cursor.cc",
          "while (at_ < text_.size() && is_digit(text_[at_])) ++at_;",
          "while (is_digit(text_.data()[at_])) ++at_;"),
    Fault("a tensor may lie anywhere", "gguf_header", "src/io/gguf/header.cc",
          "if (!begin || stated != *begin) {", "if (!begin || !stated) {"),
    Fault("the elements of an array wrap", "gguf_header", "src/io/gguf/value.cc",
          "if (count > cursor_.remaining() / least) {", "if (count * least > cursor_.remaining()) {"),
    Fault("the number of elements wraps", "gguf_header", "src/io/gguf/header.cc",
          "if (elements) elements = checked_mul(*elements, dim);",
          "elements = static_cast<int64_t>(static_cast<uint64_t>(*elements) * static_cast<uint64_t>(dim));"),
    Fault("a shard name may hold a path", "index", "src/io/directory.cc",
          "  check_member_name(name, file);\n  if (!name.ends_with", "  if (!name.ends_with"),
    Fault("a model type reaches the message as it is", "config", "src/checkpoint/model_config.cc",
          "io::show_text(type)", 'fmt::format("\\"{}\\"", type)'),
    Fault("zero points are written for every row", "packed_weights",
          "src/checkpoint/methods/compressed_tensors_planes.cc",
          "row < form.scale_rows; ++row", "row < form.rows; ++row"),
    Fault("a slice of blocks begins with a block", "gguf_blocks", "src/quant/gguf/block_type.cc",
          "(begin + i) % type.elements", "i % type.elements"),
)


def run(*command: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=COPY, text=True, capture_output=True, **options)


def copy_tree() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True)
    for name in files.stdout.splitlines():
        source, target = ROOT / name, COPY / name
        if not source.is_file() or name.startswith("testdata/"):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != source.read_bytes():
            shutil.copyfile(source, target)
    configured = run("cmake", "--preset", "dev")
    if configured.returncode != 0:
        raise SystemExit(configured.stderr)


def build(harness: str) -> None:
    built = run("cmake", "--build", "build/dev", "-j", "2", "--target", f"{harness}_fuzz")
    if built.returncode != 0:
        raise SystemExit(built.stdout[-3000:])


def hunt(harness: str, seconds: int) -> float | None:
    """Seconds until the harness stops with a finding, or None."""
    corpus = COPY / "build" / "corpus"
    shutil.rmtree(corpus, ignore_errors=True)
    corpus.mkdir(parents=True)
    begin = time.monotonic()
    result = run(f"build/dev/tests/fuzz/{harness}_fuzz", str(corpus), f"tests/fuzz/corpus/{harness}",
                 f"-max_total_time={seconds}", "-seed=1", "-artifact_prefix=build/corpus/")
    return time.monotonic() - begin if result.returncode != 0 else None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=int, default=600, help="for each fault (default 600)")


def run_harnesses(limit: int) -> int:
    copy_tree()
    missed = 0
    for fault in FAULTS:
        path = COPY / fault.file
        sound = path.read_text()
        if sound.count(fault.old) != 1:
            raise SystemExit(f"{fault.file} no longer holds the line of '{fault.name}': mend this list")
        path.write_text(sound.replace(fault.old, fault.new))
        try:
            build(fault.harness)
            seconds = hunt(fault.harness, limit)
        finally:
            path.write_text(sound)
        missed += seconds is None
        verdict = f"not found in {limit} s" if seconds is None else f"found in {seconds:.1f} s"
        print(f"{fault.harness:20} {fault.name:50} {verdict}", flush=True)
    print(f"{len(FAULTS) - missed} of {len(FAULTS)} found")
    return 1 if missed else 0
