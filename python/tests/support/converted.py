"""Models that the tool writes, and what they are converted to."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import conclave


def synth(out: pathlib.Path, *sizes: str) -> pathlib.Path:
    command = [sys.executable, "-m", "conclave", "synth", *sizes, str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return out


def convert(
    source: pathlib.Path, out: pathlib.Path, form: str, scales: str = "amax", keep: str = ""
) -> pathlib.Path:
    rules = [keep.rpartition("=")[::2]] if keep else []
    report = conclave.convert_model(source, out, form, scales=scales, tokens=4, keep=rules)
    assert report.destination == str(out)
    return out


def with_vocabulary(
    source: pathlib.Path,
    out: pathlib.Path,
    size: int,
    others: dict[str, tuple[Any, Any]] | None = None,
) -> None:
    """The file with a vocabulary of single characters, as llama.cpp asks for, and with other data
    and types for some tensors."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([chr(ord("!") + token) for token in range(size)])
    writer.add_token_types([1] * size)
    writer.add_token_merges(['! "'])
    for tensor in reader.tensors:
        data, kind = (others or {}).get(tensor.name, (tensor.data, tensor.tensor_type))
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
