#!/usr/bin/env python3
"""Checks source rules that the compiler does not: see RULES below.

Usage: tools/check_rules.py [ROOT] [--sizes]
Prints file:line and the rule for each violation; exit status 1 if there is one. An exception is
one line in tools/check_rules.allow: rule, path, and the reason after a '#'.
--sizes also lists files over 400 lines for a reader to judge; their length never fails.
"""

import pathlib
import re
import sys
from collections.abc import Callable
from typing import NamedTuple

import format_names
from source_tree import source_files, without_comments, without_literals

LONG_FILE_LINES = 400

# Types of codes. U8 is also plain bytes and F8_E8M0 a type of scales: neither is a weight format.
CODE_TYPE = r"(?:\w+::)*DType::k(?:F8E4M3|F8E5M2|F8E4M3Fnuz|F8E5M2Fnuz|F6E2M3|F6E3M2|F4|I8|I4|NF4|BnbFP4|IQ4|U4|I6|U2)\b"

# Types that hold values.
PLAIN_TYPE = r"(?:\w+::)*DType::k(?:F32|F16|BF16)\b"


class Rule(NamedTuple):
    name: str
    pattern: re.Pattern
    folders: tuple[str, ...]
    exempt: re.Pattern | None
    view: Callable[[str], str]  # what of a file is searched
    why: str


def whole(text: str) -> str:
    return text


RULES = [
    Rule("no-print",
         re.compile(r"\b(?:f?printf|puts|fputs|putchar)\s*\(|\bstd::(?:cout|cerr|clog)\b"
                    r"|\bfmt::print\b"),
         ("src", "include"), None, without_literals,
         "the library never prints: use the log sink of Context or an Error"),
    Rule("no-exit",
         re.compile(r"(?<![\w.>:])(?<!void )(?:std::|::)?(?:abort|exit|_exit|quick_exit|terminate)\s*\("),
         ("src", "include"), None, without_literals,
         "the library never ends the process: throw Error"),
    Rule("no-assert",
         re.compile(r"(?<![\w])assert\s*\(|#\s*include\s*<c?assert(?:\.h)?>"),
         ("src", "include"), None, without_literals,
         "bad input throws Error; our own invariants use CONCLAVE_DCHECK"),
    Rule("no-getenv",
         re.compile(r"\b(?:secure_)?getenv\s*\(|\benviron\b"),
         ("src", "include", "apps"),
         re.compile(r"^(?:src/layer/context|apps/conclave/output/terminal)\.cc$"), without_literals,
         "the library reads the environment in Context::from_environment() only, the tool for its "
         "terminal only"),
    Rule("no-string-switch",
         re.compile(r'[=!]=\s*"|"\s*[=!]='),
         ("src",), re.compile(r"^src/(?:checkpoint|convert|io)/|/catalog\.cc$"), without_comments,
         "strings stop at Catalog::find: compare typed values"),
    Rule("no-router-switch",
         re.compile(r"\brouter\w*(?:\.|->)name\s*[=!]=|[=!]=\s*[\w.>-]*\brouter\w*(?:\.|->)name\b"),
         ("src",), None, without_literals,
         "nothing switches on a router's name: ask its row or its traits"),
    Rule("no-format-switch",
         re.compile(rf"[=!]=\s*{CODE_TYPE}|\b{CODE_TYPE}\s*[=!]=|\bcase\s+{CODE_TYPE}"),
         ("src", "include", "apps", "python/src"), re.compile(r"^src/quant/\w+/"), without_literals,
         "nothing asks for a weight format by its type: ask quant::format_of(), is_plain() or "
         "bit_size()"),
    Rule("no-plain-list",
         re.compile(rf"[=!]=\s*{PLAIN_TYPE}[^;{{}}]*?[=!]=\s*{PLAIN_TYPE}[^;{{}}]*?[=!]=\s*{PLAIN_TYPE}"),
         ("src", "apps"), re.compile(r"^(?:src/core/|apps/conclave/value_types\.h$)"),
         without_literals,
         "which types hold values is asked of is_plain(), or of the tool's holds_values(), not "
         "spelt out"),
    Rule("no-spelt-stride",
         re.compile(r"\b(\w+)\.row_stride\s*!=\s*0\s*\?\s*\1\.row_stride\s*:\s*\1\.shape\[1\]"),
         ("src",), re.compile(r"^src/core/row_stride\.h$"), without_literals,
         "the distance of a matrix's rows is row_stride() of core/row_stride.h"),
    Rule("no-shared-mode",
         re.compile(r"[=!]=\s*(?:\w+::)*SharedMode::k\w+|\bSharedMode::k\w+\s*[!=]="
                    r"|\bcase\s+(?:\w+::)*SharedMode::"),
         ("src",), re.compile(r"^src/(?:core/shared_facts\.h$|checkpoint/architectures/)"),
         without_literals,
         "nothing tells modes of shared experts apart: ask shared_facts() what a mode means"),
    Rule("no-swallow",
         re.compile(r"catch\s*\(\s*\.\.\.\s*\)\s*\{\s*\}"),
         ("src", "apps", "include"), None, without_literals,
         "an error is handled or passed on, never dropped"),
    Rule("no-using-directive",
         re.compile(r"^\s*using\s+namespace\b", re.MULTILINE),
         ("include",), None, without_literals,
         "a header does not open namespaces for its users"),
    Rule("no-id-order",
         re.compile(r"[<>]=?\s*(?:Weight(?:Mlp|Matrix|Plane)|LayerWeight)::k\w+\b(?!\s*>)"),
         ("src", "include", "apps", "python/src"), None, without_literals,
         "the order of ids means nothing: ask an id for its MLP, matrix or plane"),
    Rule("no-type-order",
         re.compile(r"[<>]=?\s*(?:conclave::)?DType::k\w+\b(?!\s*[>,])"),
         ("src", "include", "apps", "python/src"), None, without_literals,
         "the order of types means nothing: ask a list or a property of them"),
    Rule("no-mutable-static",
         re.compile(r"\b(?:static|thread_local)\s+(?!const\b|constexpr\b|inline\b|CONCLAVE_|void\b)"
                    r"[\w:<>,&*\s+]+?[\s&*]\w+\s*(?:;|=|\{|\[)"),
         ("src", "include"), None, without_literals,
         "state belongs to an object that someone owns"),
    Rule("no-driver-query",
         re.compile(r"\bcuda(?:Func[SG]et\w*|Device(?:[GS]et\w*|Reset|CanAccessPeer)|[GS]etDevice\w*"
                    r"|Occupancy\w*|PointerGetAttributes?|MemGetInfo|Ctx\w*"
                    r"|GetDriverEntryPoint\w*|(?:Driver|Runtime)GetVersion)\s*\("
                    r"|\b(?:allow_(?:shared_bytes|large_cluster)|holds_cluster"
                    r"|find_cluster_blocks|device_info|count_devices)\s*\("),
         ("src",), re.compile(r"^src/cuda/(?:device_info|launch)\.(?:h|cc)$"), without_literals,
         "a forward asks the driver for nothing: ask when the layer is made, and keep the answer in "
         "the plan"),
    Rule("whole-clauses",
         re.compile(r"^[ \t]*//+ Of\b|\S[ \t]+// [Oo]f\b", re.MULTILINE),
         ("src", "include", "apps", "python/src", "tests", "bench", "examples"), None, whole,
         "a comment is a clause or a noun phrase, not a genitive: say what the thing is"),
    Rule("says-why",
         re.compile(r"^[ \t]*//+ What\b", re.MULTILINE),
         ("src", "include", "apps", "python/src"), None, whole,
         "a comment is a clause that says why, not \"What ...\": say what the thing does"),
]


class TreeRule(NamedTuple):
    name: str
    find: Callable[[pathlib.Path], list[tuple[str, int]]]  # file and line of each violation
    why: str


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


# May write names of routers into a spec: tables of model families and of vLLM's methods, and the
# catalog itself.
NAMES_ROUTERS = re.compile(r"^src/(?:checkpoint/|routing/(?:catalog|methods)\.cc$)")
ROUTER_ROW = re.compile(r'RouterRow\s*\{\s*\.name\s*=\s*"(\w+)"')
LITERAL = re.compile(r'"(\w+)"')


def router_names_elsewhere(root: pathlib.Path) -> list[tuple[str, int]]:
    """Literals that are the name of a router, outside the router's own folder."""
    catalog = root / "src/routing/catalog.cc"
    if not catalog.is_file():
        return []
    names = set(ROUTER_ROW.findall(without_comments(catalog.read_text(encoding="utf-8"))))
    found = []
    for path in source_files(root, "src"):
        name = path.relative_to(root).as_posix()
        if NAMES_ROUTERS.search(name):
            continue
        text = without_comments(path.read_text(encoding="utf-8"))
        found += [(name, line_of(text, match.start())) for match in LITERAL.finditer(text)
                  if match[1] in names and not name.startswith(f"src/routing/{match[1]}/")]
    return found


ROUTER_TENSOR = re.compile(r'RouterTensor\s*\{\s*\.name\s*=\s*"(\w+)"')


def router_tensors_elsewhere(root: pathlib.Path) -> list[tuple[str, int]]:
    """Names of a router's own tensors, as identifiers or literals, outside the router's folder."""
    texts = {path.relative_to(root).as_posix(): without_comments(path.read_text(encoding="utf-8"))
             for path in source_files(root, "src")}
    owners = {tensor: "/".join(name.split("/")[:3]) + "/" for name, text in texts.items()
              if name.startswith("src/routing/") for tensor in ROUTER_TENSOR.findall(text)}
    found = []
    for tensor, owner in owners.items():
        constant = "k" + "".join(word.capitalize() for word in tensor.split("_"))
        named = re.compile(rf"\b(?:{tensor}_?|{constant})\b")
        found += [(name, line_of(text, match.start())) for name, text in texts.items()
                  if not name.startswith(owner) for match in named.finditer(text)]
    return found


DEVICE_TABLE = "python/conclave/_devices.py"
DEVICE_COMPARED = re.compile(r"(?:layer|context|core)\.device\s*[=!]="
                             r"|[=!]=\s*[\w.]*(?:layer|context|core)\.device\b"
                             r"|\.type\s*==\s*\"cpu\"\s+else\s+f?\"")


def device_names_compared(root: pathlib.Path) -> list[tuple[str, int]]:
    """Files of the Python package that compare the device of a layer or context with a name."""
    found = []
    for path in sorted((root / "python/conclave").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        if name != DEVICE_TABLE:
            found += [(name, line_of(text, m.start())) for m in DEVICE_COMPARED.finditer(text)]
    return found


CATALOG = re.compile(r"\bCatalog<\w+>\s+(\w+)\s*\(\s*\)\s*\{")


def unused_catalogs(root: pathlib.Path) -> list[tuple[str, int]]:
    """Catalogs that no other module of the library asks."""
    texts = {path.relative_to(root).as_posix(): without_literals(path.read_text(encoding="utf-8"))
             for path in source_files(root, "src")}
    found = []
    for name, text in texts.items():
        module = "/".join(name.split("/")[:2]) + "/"
        for match in CATALOG.finditer(text):
            call = re.compile(rf"\b{match[1]}\s*\(")
            if not any(call.search(other) for place, other in texts.items()
                       if not place.startswith(module)):
                found.append((name, line_of(text, match.start())))
    return found


TREE_RULES = [
    TreeRule("no-router-name", router_names_elsewhere,
             "a router is named in its own folder and its row only"),
    TreeRule("no-router-tensor", router_tensors_elsewhere,
             "a router's own tensor is named in its folder only: go through router_tensors_of() or "
             "all_router_tensors()"),
    TreeRule("no-device-name", device_names_compared,
             f"what a kind of device does stands in its row of {DEVICE_TABLE}: ask traits_of()"),
    TreeRule("catalog-in-use", unused_catalogs,
             "a catalog that no other module asks decides nothing"),
    TreeRule("format-names", format_names.violations,
             "what a format needs lies in its folder of src/quant; tools/format_names.py --files "
             "lists who may name one, and their recorded number only falls"),
]


def allowed_exceptions(root: pathlib.Path) -> set[tuple[str, str]]:
    path = root / "tools" / "check_rules.allow"
    if not path.is_file():
        return set()
    entries = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        fields, _, reason = line.partition("#")
        if not fields.strip():
            continue
        words = fields.split()
        if len(words) != 2 or not reason.strip():
            raise SystemExit(f"{path}: expected 'rule path  # reason', found '{line}'")
        entries.add((words[0], words[1]))
    return entries


def violations(root: pathlib.Path) -> list[str]:
    allowed = allowed_exceptions(root)
    found = []
    for rule in RULES:
        for path in source_files(root, *rule.folders):
            name = path.relative_to(root).as_posix()
            if (rule.name, name) in allowed or (rule.exempt and rule.exempt.search(name)):
                continue
            text = rule.view(path.read_text(encoding="utf-8"))
            for match in rule.pattern.finditer(text):
                line = text.count("\n", 0, match.end()) + 1
                found.append(f"{name}:{line}: {rule.name}: {rule.why}")
    for rule in TREE_RULES:
        found += [f"{name}:{line}: {rule.name}: {rule.why}" for name, line in rule.find(root)
                  if (rule.name, name) not in allowed]
    return found


def long_files(root: pathlib.Path) -> list[str]:
    report = []
    for path in source_files(root, "include", "src", "apps", "tests", "bench", "examples"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > LONG_FILE_LINES:
            report.append(f"{lines:6d} lines  {path.relative_to(root)}")
    return sorted(report, reverse=True)


def main(argv: list[str]) -> int:
    folders = [a for a in argv[1:] if not a.startswith("--")]
    root = pathlib.Path(folders[0] if folders else pathlib.Path(__file__).parent.parent).resolve()
    found = violations(root)
    print("\n".join(found) if found else f"rules: {len(RULES) + len(TREE_RULES)} rules hold")
    if "--sizes" in argv:
        print("\n".join(long_files(root)) or f"sizes: no file is over {LONG_FILE_LINES} lines")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
