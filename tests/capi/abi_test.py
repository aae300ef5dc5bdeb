#!/usr/bin/env python3
"""Breaks the C interface in copies of the tree: check_abi.py has to see each.

Usage: abi_test.py COMPILER
"""

import pathlib
import shutil
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import check_abi  # noqa: E402

# File, what is replaced, by what, and what the check says of it.
BREAKS = [
    ("layer.h", "  int64_t* expert_load;", "  int64_t in_the_middle;\n  int64_t* expert_load;",
     "struct conclave_forward_args"),
    ("tensor.h", "  int64_t row_stride;", "", "struct conclave_tensor has become smaller"),
    ("layer.h", "  int32_t spare_experts;", "  int32_t spares;", "struct conclave_layer_options"),
    ("layer.h", "  conclave_id_policy id_policy;", "  int64_t id_policy;",
     "struct conclave_layer_options"),
    # Members that other programs write, of a function's type, and of a struct in an array.
    ("router.h", "  void (*release)(void* user);", "  int32_t (*release)(void* user);",
     "struct conclave_own_router"),
    ("router.h", "  int64_t banned_stride;", "  int32_t banned_stride;", "struct conclave_route_call"),
    ("adapter.h", "  double scale;", "  float scale;", "struct conclave_lora_factors"),
    ("record.h", "  int64_t sequence;\n  int64_t position;", "  int64_t position;\n  int64_t sequence;",
     "struct conclave_token_key"),
    ("placement.h", "CONCLAVE_BALANCE_SHARED_RANKS = 1", "CONCLAVE_BALANCE_SHARED_RANKS = 2",
     "CONCLAVE_BALANCE_SHARED_RANKS"),
    ("refit.h", "  uint64_t epoch;", "  int64_t epoch;", "struct conclave_refit_options"),
    ("refit.h", "CONCLAVE_REFIT_MODE_IN_PLACE = 2", "CONCLAVE_REFIT_MODE_IN_PLACE = 3",
     "CONCLAVE_REFIT_MODE_IN_PLACE"),
    ("source.h", "  conclave_memory memory;", "  int64_t num_experts_first;\n  conclave_memory memory;",
     "struct conclave_source_options"),
    ("layer.h", "  size_t rank_tokens_count;", "", "struct conclave_forward_args has become smaller"),
    ("own_communicator.h", "  uint64_t number;  ", "  int64_t number;  ", "struct conclave_comm_operation"),
    ("own_communicator.h", "CONCLAVE_COMM_KIND_BARRIER = 4", "CONCLAVE_COMM_KIND_BARRIER = 7",
     "CONCLAVE_COMM_KIND_BARRIER"),
    ("status.h", "CONCLAVE_ERROR_SHAPE = 104", "CONCLAVE_ERROR_SHAPE = 105", "CONCLAVE_ERROR_SHAPE"),
    ("tensor.h", "CONCLAVE_DTYPE_F16 = 10", "CONCLAVE_DTYPE_HALF = 10", "CONCLAVE_DTYPE_F16"),
    ("base.h", "CONCLAVE_C_API const char* conclave_version(void)",
     "CONCLAVE_C_API const char* conclave_version_text(void)", "conclave_version"),
    ("base.h", "conclave_status_name(conclave_status status)", "conclave_status_name(int64_t status)",
     "conclave_status_name"),
]
# Additions break nothing, and have to be recorded.
ADDITIONS = [
    ("layer.h", "  size_t rank_tokens_count;", "  size_t rank_tokens_count;\n  int64_t at_the_end;"),
    ("router.h", "  size_t scratch_bytes;", "  size_t scratch_bytes;\n  void (*at_the_end)(void* user);"),
    ("record.h", "CONCLAVE_WHEN_FULL_ERROR = 2", "CONCLAVE_WHEN_FULL_ERROR = 2,\n  CONCLAVE_WHEN_FULL_GROW = 3"),
    ("tensor.h", "CONCLAVE_DTYPE_U2 = 29", "CONCLAVE_DTYPE_U2 = 29,\n  CONCLAVE_DTYPE_NEXT = 30"),
]


def copy_with(folder: pathlib.Path, name: str, old: str, new: str) -> pathlib.Path:
    root = folder / "tree"
    if root.exists():
        shutil.rmtree(root)
    shutil.copytree(ROOT / "include/conclave", root / "include/conclave")
    (root / "src/capi").mkdir(parents=True)
    shutil.copy(ROOT / check_abi.RECORD, root / check_abi.RECORD)
    header = root / "include/conclave/c" / name
    text = header.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{name}: '{old}' stands there {text.count(old)} times"
    header.write_text(text.replace(old, new), encoding="utf-8")
    return root


def main(compiler: str) -> int:
    failures = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for header, old, new, says in BREAKS:
            root = copy_with(folder, header, old, new)
            for write in (False, True):
                found = check_abi.check(root, compiler, None, write)
                if not any(says in line for line in found):
                    failures.append(f"{header}: '{old}' -> '{new}': not seen, but {found}")
        for header, old, new in ADDITIONS:
            root = copy_with(folder, header, old, new)
            if not any("not recorded" in line for line in check_abi.check(root, compiler, None, False)):
                failures.append(f"{header}: '{new}' is not recorded, and nobody says so")
            if check_abi.check(root, compiler, None, True) or check_abi.check(root, compiler, None, False):
                failures.append(f"{header}: '{new}' cannot be recorded")
    print("\n".join(failures) or f"abi: {len(BREAKS)} breaks and {len(ADDITIONS)} additions are seen")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
