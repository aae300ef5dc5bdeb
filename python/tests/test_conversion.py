"""`conclave.convert_model`: what it writes, what it says of that, and what ends it."""

from __future__ import annotations

import json
import math
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

import conclave

FORMAT = "int8-channel"


@pytest.fixture
def source(testdata: pathlib.Path) -> pathlib.Path:
    return testdata / "mixtral-tiny"


def files_of(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_tool_writes_the_same_model(source, tmp_path):
    report = conclave.convert_model(source, tmp_path / "ours", FORMAT, tokens=4, seed=3)
    command = [sys.executable, "-m", "conclave", "convert", str(source), str(tmp_path / "tools")]
    options = ["--format", FORMAT, "--tokens", "4", "--seed", "3"]
    subprocess.run([*command, *options], check=True, capture_output=True)
    ours, tools = files_of(tmp_path / "ours"), files_of(tmp_path / "tools")
    del tools["conversion.html"]  # the tool's page
    said, tool_said = (json.loads(files.pop("conversion.json")) for files in (ours, tools))
    assert ours == tools
    tool_said["destination"] = said["destination"]
    assert said == tool_said
    assert [matrix.name for matrix in report.matrices] == [m["name"] for m in said["matrices"]]
    assert [layer.tokens for layer in report.layers] == [tuple(x["tokens"]) for x in said["layers"]]
    assert (report.bytes_before, report.bytes_after) == (said["bytes_before"], said["bytes_after"])
    assert report.model == report.destination == str(tmp_path / "ours")
    assert report.model_type == "mixtral" and report.incomplete == ""


def test_the_result_is_a_model_that_runs(source, tmp_path):
    report = conclave.convert_model(source, tmp_path / "out", FORMAT)
    assert len(report.layers) == len(conclave.inspect(source).layers)
    size = conclave.inspect(source).layers[0].spec.hidden_size
    hidden = np.random.default_rng(5).standard_normal((6, size), np.float32)
    before = conclave.Layer.from_checkpoint(source, 0)(hidden)
    after = conclave.Layer.from_checkpoint(report.model, 0)(hidden)
    # Tokens of other rows move likewise, unless rounding changes what they are routed to.
    moved = np.linalg.norm(after - before) / np.linalg.norm(before)
    assert 0 < moved < 2 * max(layer.worst for layer in report.layers)


def test_weights_err_by_less_than_half_a_step(source, tmp_path):
    report = conclave.convert_model(source, tmp_path / "out", FORMAT, tokens=0)
    assert report.layers == () and report.tokens == 0
    # A quotient of up to 127 steps is rounded to float32, and so is the scale below it.
    half = 0.5 + 127 * 2 * 2.0**-24
    for matrix in report.matrices:
        assert 0 < matrix.worst_steps <= half, matrix.name
        assert matrix.format == FORMAT and matrix.bytes_after < matrix.bytes_before
    squares = [m.relative_error**2 for m in report.matrices]
    assert math.sqrt(min(squares)) <= report.relative_error <= math.sqrt(max(squares))


def test_layers_and_rules_say_what_is_converted(source, tmp_path):
    keep = {"*.w2": "source"}
    report = conclave.convert_model(
        source, tmp_path / "out", FORMAT, layers=[1], keep=keep, tokens=0
    )
    assert {matrix.layer for matrix in report.matrices} == {1}
    assert {matrix.kind for matrix in report.matrices} == {"gate", "up"}
    pairs = conclave.convert_model(
        source, tmp_path / "pairs", FORMAT, layers=[1], keep=[("*.w2", "source")], tokens=0
    )
    assert [m.name for m in pairs.matrices] == [m.name for m in report.matrices]


def test_a_gguf_file_is_in_the_directory(testdata, tmp_path):
    source = testdata / "gguf" / "llama-split" / "model-00001-of-00003.gguf"
    report = conclave.convert_model(source, tmp_path / "model.gguf", "q4_0", tokens=0)
    assert pathlib.Path(report.model).parent == tmp_path / "model.gguf"
    assert len(conclave.inspect(report.model).layers) == len(conclave.inspect(source).layers)


def test_own_rows_are_compared(source, tmp_path):
    spec = conclave.inspect(source).layers[0].spec
    generator = np.random.default_rng(2)
    rows = generator.standard_normal((5, 2 * spec.hidden_size), np.float32)
    strided = rows[:, : spec.hidden_size]
    one = conclave.convert_model(source, tmp_path / "one", FORMAT, rows=strided)
    each = {0: strided.copy(), 1: {"hidden": strided.copy(), "router_input": None}}
    two = conclave.convert_model(source, tmp_path / "two", FORMAT, rows=each)
    assert one.tokens == two.tokens == 5
    assert one.layers == two.layers
    other = conclave.convert_model(source, tmp_path / "other", FORMAT, rows=strided * 2)
    assert other.layers != one.layers


def test_progress_is_told_on_this_thread(source, tmp_path):
    told = []

    def progress(phase, done, total):
        told.append((phase, done, total, threading.get_ident()))

    conclave.convert_model(source, tmp_path / "out", FORMAT, tokens=1, progress=progress)
    assert {thread for *_, thread in told} == {threading.get_ident()}
    for phase in ("converting", "measuring"):
        done = [(at, total) for name, at, total, _ in told if name == phase]
        assert done == sorted(done) and done[-1][0] == done[-1][1]
    assert [name for name, *_ in told] == sorted(name for name, *_ in told)


@pytest.mark.parametrize("phase", ["converting", "measuring"])
def test_what_progress_raises_ends_it(phase, source, tmp_path):
    def progress(name, done, total):
        if name == phase:
            raise conclave.ConclaveCancelledError(phase)

    with pytest.raises(conclave.ConclaveCancelledError, match=phase):
        conclave.convert_model(source, tmp_path / "out", FORMAT, tokens=1, progress=progress)
    assert list(tmp_path.iterdir()) == []


def test_a_kept_conversion_goes_on(source, tmp_path):
    out = tmp_path / "out"

    def stop(name, done, total):
        if done < total:
            return
        raise RuntimeError("all but the name is there")

    small = dict(shard_bytes=30_000, tokens=0)
    with pytest.raises(RuntimeError, match="all but the name"):
        conclave.convert_model(source, out, FORMAT, progress=stop, keep_unfinished=True, **small)
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    report = conclave.convert_model(source, out, FORMAT, **small)
    assert 0 < report.shards_kept < report.shards
    whole = conclave.convert_model(source, tmp_path / "whole", FORMAT, **small)
    assert whole.shards_kept == 0
    ours, theirs = files_of(out), files_of(tmp_path / "whole")
    del ours["conversion.json"], theirs["conversion.json"]
    assert ours == theirs


# In a process of its own, whose handler of SIGINT no other test has changed.
INTERRUPTED = """
import os, signal, sys, conclave
signal.signal(signal.SIGINT, signal.default_int_handler)
told = []
def interrupt(name, done, total):
    if not told:
        told.append(done)
        os.kill(os.getpid(), signal.SIGINT)
try:
    conclave.convert_model(sys.argv[1], sys.argv[2], "int4-group32", progress=interrupt)
except KeyboardInterrupt:
    sys.exit(7 if told else 8)
"""


def test_ctrl_c_ends_it_and_leaves_nothing(testdata, tmp_path):
    model = tmp_path / "model"
    sizes = ["-E", "8", "-k", "2", "-H", "512", "-I", "512", "--layers", "8"]
    command = [sys.executable, "-m", "conclave", "synth", *sizes, str(model)]
    subprocess.run(command, check=True, capture_output=True)
    command = [sys.executable, "-c", INTERRUPTED, str(model), str(tmp_path / "out")]
    assert subprocess.run(command, check=False, timeout=120).returncode == 7
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_other_threads_run_meanwhile(source, tmp_path):
    """A callback that waits for another thread would wait for ever with the GIL held."""
    seen = threading.Event()
    other = threading.Thread(target=seen.set)

    def progress(name, done, total):
        if not other.ident:
            other.start()

    conclave.convert_model(source, tmp_path / "out", FORMAT, progress=progress)
    assert seen.wait(10)
    other.join()


def test_a_model_is_replaced_where_asked(source, tmp_path):
    out = tmp_path / "out"
    conclave.convert_model(source, out, FORMAT, tokens=0)
    with pytest.raises(conclave.ConclaveFileError, match="replace=True") as failure:
        conclave.convert_model(source, out, "fp8-block", tokens=0)
    assert failure.value.name == "kFileWrite" and "::" not in str(failure.value)
    report = conclave.convert_model(source, out, "fp8-block", tokens=0, replace=True, report=False)
    assert report.format == "fp8-block" and not (out / "conversion.json").exists()


ROWS = np.zeros((4, 7), np.float32)
WRONG = [
    ({"format": "int3"}, conclave.ConclaveValueError, "kUnknownName", "format"),
    ({"format": 3}, conclave.ConclaveTypeError, "kDType", "format"),
    ({"format": "int8-channel:x"}, conclave.ConclaveValueError, "kInvalidArgument", "format"),
    ({"container": "zip"}, conclave.ConclaveValueError, "kUnknownName", "container"),
    ({"container": "gguf"}, conclave.ConclaveValueError, "kUnknownName", "format"),
    ({"layers": []}, conclave.ConclaveValueError, "kInvalidArgument", "layers"),
    ({"layers": [0, 0]}, conclave.ConclaveValueError, "kInvalidArgument", "layers"),
    ({"layers": [7]}, conclave.ConclaveCheckpointError, "kLayerNotFound", ""),
    ({"layers": "0-3"}, conclave.ConclaveTypeError, "kDType", "layers"),
    ({"keep": "*.w2=source"}, conclave.ConclaveTypeError, "kDType", "keep"),
    ({"keep": ["*.w2=source"]}, conclave.ConclaveTypeError, "kDType", "keep[0]"),
    ({"keep": {"*": 3}}, conclave.ConclaveTypeError, "kDType", "keep[0]"),
    ({"keep": {"": "source"}}, conclave.ConclaveValueError, "kInvalidArgument", "keep"),
    ({"keep": {"nothing": "source"}}, conclave.ConclaveValueError, "kInvalidArgument", "keep"),
    ({"keep": {"*": "q4_k"}}, conclave.ConclaveValueError, "kUnknownName", "keep"),
    ({"scales": "best"}, conclave.ConclaveValueError, "kUnknownName", "scales"),
    ({"shard_bytes": 0}, conclave.ConclaveValueError, "kInvalidArgument", "shard_bytes"),
    ({"shard_bytes": "5GB"}, conclave.ConclaveTypeError, "kDType", "shard_bytes"),
    ({"tokens": -1}, conclave.ConclaveValueError, "kInvalidArgument", "tokens"),
    ({"seed": 2**64}, conclave.ConclaveValueError, "kInvalidArgument", "seed"),
    ({"replace": 1}, conclave.ConclaveTypeError, "kDType", "replace"),
    ({"progress": 1}, conclave.ConclaveTypeError, "kDType", "progress"),
    ({"destination": ""}, conclave.ConclaveValueError, "kInvalidArgument", "destination"),
    ({"source": 4}, conclave.ConclaveTypeError, "kDType", "source"),
    ({"source": "no-such-model"}, conclave.ConclaveFileNotFoundError, "kFileNotFound", ""),
    ({"rows": ROWS}, conclave.ConclaveValueError, "kShape", "rows.hidden"),
    ({"rows": ROWS[:0]}, conclave.ConclaveValueError, "kShape", "rows.hidden"),
    ({"rows": ROWS.astype(np.float64)}, conclave.ConclaveTypeError, "kDType", "rows.hidden"),
    ({"rows": {0: ROWS.tolist()}}, conclave.ConclaveTypeError, "kDType", "rows.hidden"),
    ({"rows": {0: {"logits": ROWS}}}, conclave.ConclaveTypeError, "kDType", "rows[0]"),
    ({"rows": {0: {"token_ids": ROWS}}}, conclave.ConclaveValueError, "kInvalidArgument", ""),
    ({"rows": {"first": ROWS}}, conclave.ConclaveTypeError, "kDType", "rows"),
]


@pytest.mark.parametrize("change, kind, name, argument", WRONG)
def test_a_wrong_argument_is_named_and_nothing_written(
    change, kind, name, argument, source, tmp_path
):
    given = {"source": source, "destination": tmp_path / "out", "format": FORMAT, **change}
    with pytest.raises(kind) as failure:
        conclave.convert_model(**given)
    assert failure.value.name == name, failure.value
    if argument:
        assert failure.value.tensor == argument, failure.value
    assert "::" not in str(failure.value)
    assert list(tmp_path.iterdir()) == []


def test_a_layer_without_rows_is_named(source, tmp_path):
    size = conclave.inspect(source).layers[0].spec.hidden_size
    rows = {0: np.ones((3, size), np.float32)}
    with pytest.raises(conclave.ConclaveValueError, match="layer 1"):
        conclave.convert_model(source, tmp_path / "out", FORMAT, rows=rows)
    assert list(tmp_path.iterdir()) == []
    conclave.convert_model(source, tmp_path / "out", FORMAT, rows=rows, layers=[0])


def test_formats_are_those_of_the_tool():
    formats = conclave.conversion_formats()
    assert conclave.ConversionFormat("q4_k", "", "gguf") in formats
    assert {form.container for form in formats if form.name == "mxfp4"} == {"directory", "gguf"}
    assert any(form.name == "gptq-int4" and "group" in form.options for form in formats)
