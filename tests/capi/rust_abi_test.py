#!/usr/bin/env python3
"""Compares the declarations of the crate of Rust with src/capi/abi.txt: members by name, type and
order, functions in them with their arguments, constants, and functions. examples/rust has the same
declarations, and none of its own.

Usage: rust_abi_test.py
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUST = ROOT / "examples/rust_crate/src/ffi.rs"
PROGRAM = ROOT / "examples/rust"
ABI = ROOT / "src/capi/abi.txt"
STRUCT = re.compile(
    r"#\[repr\(C\)\]\n(?:#\[derive[^\n]*\n)?pub struct (\w+) \{\n(.*?)\n\}", re.DOTALL
)
MEMBER = re.compile(r"pub (\w+):\s*(Option<.*?>(?=,\n|,$)|[^,\n]+),", re.DOTALL)
RUST_POINTER = re.compile(r'Option<extern "C" fn\((.*?),?\)(?: -> (\w+))?,?>')
C_POINTER = re.compile(r"(.+?)\(\*\)\((.*)\)")
CONSTANT = re.compile(r"pub const (\w+): \w+ = (\d+);")
FUNCTION = re.compile(r"pub fn (\w+)\((.*?)\)(?: -> ([^;]+))?;", re.DOTALL)
SCALARS = {
    "size_t": "usize",
    "int32_t": "i32",
    "uint32_t": "u32",
    "uint8_t": "u8",
    "int64_t": "i64",
    "uint64_t": "u64",
    "float": "f32",
    "double": "f64",
    "char": "c_char",
    "void": "c_void",
    "conclave_status": "Status",
}


def snake(name: str) -> str:
    return "conclave_" + re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def in_rust(c_type: str, handles: set[str]) -> str:
    """The type of Rust that stands for one of C; enumerations are i32."""
    array = re.fullmatch(r"(\w+)\[(\w+)\]", c_type)
    if array:
        return f"[{in_rust(array[1], handles)}; {array[2].removeprefix('CONCLAVE_')}]"
    if c_type.endswith("*") or c_type.endswith("* const"):
        inner = c_type.removesuffix(" const").removesuffix("*")
        is_const = (inner.startswith("const ") and "*" not in inner) or inner.endswith("* const")
        kind = "*const " if is_const else "*mut "
        return kind + in_rust(inner, handles)
    name = c_type.removeprefix("const ")
    if name in SCALARS:
        return SCALARS[name]
    return "".join(word.title() for word in name.split("_")[1:]) if name in handles else "i32"


def read_abi() -> tuple[dict, dict, dict]:
    structs: dict[str, list[tuple[str, str]]] = {}
    constants: dict[str, int] = {}
    functions: dict[str, str] = {}
    members: list[tuple[str, str]] = []
    for line in ABI.read_text(encoding="utf-8").splitlines():
        if line.startswith("struct "):
            members = structs.setdefault(line.split()[1], [])
        elif line.startswith("  "):
            name, c_type = line.split(maxsplit=2)[2].split(": ", 1)
            members.append((name, c_type))
        elif line.startswith("constant "):
            _, name, value = line.split()
            constants[name] = int(value)
        elif line.startswith("function "):
            name = re.search(r"(\w+)\(", line)
            functions[name[1] if name else ""] = line.removeprefix("function ")
    return structs, constants, functions


def same_function(rust: str, c_type: str, handles: set[str]) -> bool:
    """A pointer to a function: arguments by name and type, and what it returns."""
    in_c = C_POINTER.fullmatch(c_type)
    one_line = re.sub(r"(?<=\()\s+|\s+(?=\))|(?<=<)\s+|\s+(?=>)", "", " ".join(rust.split()))
    found = RUST_POINTER.fullmatch(one_line)
    if not in_c or not found:
        return False
    expected = [re.fullmatch(r"(.*[\s*])(\w+)", each) for each in in_c[2].split(", ")]
    arguments = [each.split(": ", 1) for each in found[1].split(", ")]
    if len(expected) != len(arguments) or (found[2] or "c_void") != in_rust(in_c[1], handles):
        return False
    return all(
        c and name == c[2] and same(rust_type, c[1].strip(), handles)
        for c, (name, rust_type) in zip(expected, arguments, strict=True)
    )


def same(rust: str, c_type: str, handles: set[str]) -> bool:
    """A pointer to c_void may stand for a struct that the crate never passes."""
    if "(*)" in c_type:
        return same_function(rust, c_type, handles)
    expected = in_rust(c_type, handles)
    of_anything = re.sub(r"\w+$", "c_void", expected)
    return rust in (expected, of_anything if "*" in expected else expected)


def compare_structs(text: str, structs: dict, handles: set[str]) -> list[str]:
    wrong = []
    for name, body in STRUCT.findall(text):
        recorded = structs.get(snake(name))
        if recorded is None:
            wrong.append(f"{name}: C has no {snake(name)}")
            continue
        members = MEMBER.findall(body)
        for (rust_name, rust_type), (c_name, c_type) in zip(members, recorded, strict=False):
            if rust_name != c_name or not same(rust_type, c_type, handles):
                wrong.append(f"{name}.{rust_name}: {rust_type}: C has {c_name}: {c_type}")
        if not members or len(members) > len(recorded):
            wrong.append(f"{name}: {len(members)} members, C has {len(recorded)}")
    return wrong


def compare_functions(text: str, functions: dict, handles: set[str]) -> list[str]:
    wrong = []
    for name, arguments, returned in FUNCTION.findall(text):
        c_head, c_arguments = functions.get(name, "?(").rstrip(")").split("(", 1)
        c_types = [] if c_arguments in ("", "void") else c_arguments.split(", ")
        rust_types = [
            part.split(": ", 1)[1].strip() for part in arguments.split(",") if part.strip()
        ]
        c_returned = c_head.rsplit(" ", 1)[0]
        is_same = (returned.strip() or "c_void") == in_rust(c_returned, handles)
        is_same &= len(c_types) == len(rust_types)
        if not is_same or not all(map(lambda r, c: same(r, c, handles), rust_types, c_types)):
            wrong.append(f"{name}: {rust_types} -> {returned}: C has {functions.get(name)}")
    return wrong


def compare(text: str) -> list[str]:
    structs, constants, functions = read_abi()
    handles = {*structs, *re.findall(r"(conclave_\w+)\*", " ".join(functions.values()))}
    wrong = [
        f"{name}: C has {constants.get('CONCLAVE_' + name)}"
        for name, value in CONSTANT.findall(text)
        if constants.get("CONCLAVE_" + name) != int(value)
    ]
    return (
        wrong
        + compare_structs(text, structs, handles)
        + compare_functions(text, functions, handles)
    )


# Each break replaces a text of the declarations, and must be told by the message beside it.
BREAKS = [
    (
        "    pub forwards: i64,\n    pub tokens: i64,",
        "    pub tokens: i64,\n    pub forwards: i64,",
        "LayerStats",
    ),
    ("    pub scale: f64,", "    pub scale: f32,", "LoraFactors.scale"),
    ("    pub epoch: u64,", "    pub epoch: i64,", "RefitOptions.epoch"),
    ("    pub shape: [i64; MAX_RANK],", "    pub shape: [i64; 4],", "Tensor.shape"),
    ("DTYPE_F32: i32 = 12", "DTYPE_F32: i32 = 13", "DTYPE_F32"),
    (
        "(layer: *mut Layer, id: i32)",
        "(layer: *mut Layer, id: i64)",
        "conclave_layer_remove_adapter",
    ),
    ("(refit: *mut Refit) -> Status", "(refit: *mut Layer) -> Status", "conclave_refit_commit"),
    ("conclave_recorder_write(", "conclave_recorder_writes(", "conclave_recorder_writes"),
    (
        "            number: u64,\n            deadline_ns",
        "            deadline_ns",
        "OwnCommunicator.wait",
    ),
    ("            deadline_ns: i64", "            deadline_ns: u64", "OwnCommunicator.wait"),
    ("            number: u64,", "            count: u64,", "OwnCommunicator.wait"),
    ("call: *mut RouteCall) -> Status", "call: *mut RouteCall)", "OwnRouter.route"),
]


def program_declarations() -> list[str]:
    """What the program in one file declares for itself, which nothing here would compare."""
    return [
        f"{path.relative_to(ROOT)}: declares functions of C; those of {RUST.name} serve"
        for path in sorted(PROGRAM.glob("*.rs"))
        if re.search(r'extern "C" \{|#\[repr\(C\)\]', path.read_text(encoding="utf-8"))
    ]


def main() -> int:
    text = RUST.read_text(encoding="utf-8")
    wrong = compare(text) + program_declarations()
    for old, new, expected in BREAKS:
        broken = text.replace(old, new)
        if broken == text or not any(line.startswith(expected) for line in compare(broken)):
            wrong.append(f"a break of {expected} is not seen")
    print("\n".join(wrong) or f"{len(FUNCTION.findall(text))} functions are those of {ABI.name}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
