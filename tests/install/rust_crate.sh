#!/bin/sh
# Usage: rust_crate.sh LINKER PKGCONFIG_DIR CRATE WORK_DIR CASES [ARGUMENT]... Builds the crate and its
# example by rustc with the libraries of the installed conclave.pc and runs that, checks that CASES are
# refused one by one, and builds the same by cargo where it is there. Exit status 77 without rustc.
set -eu
linker=$1 crate=$3 work=$4 cases=$5
export PKG_CONFIG_PATH="$2"
shift 5
if ! command -v rustc >/dev/null; then
  echo "no rustc in PATH: the crate of Rust is not built (rustc of Debian 12 will do)"
  exit 77
fi
mkdir -p "$work"
link=''
for word in $(pkg-config --libs conclave) -lc; do link="$link -C link-arg=$word"; done
rustc --edition 2021 -D warnings -O --crate-type rlib --crate-name conclave "$crate/src/lib.rs" \
  -o "$work/libconclave.rlib"
# Word splitting of the options is meant. A static library asks for libc after Rust's own libraries.
# shellcheck disable=SC2086
rustc --edition 2021 -D warnings -O "$crate/examples/serve.rs" -o "$work/serve" -C "linker=$linker" \
  --extern "conclave=$work/libconclave.rlib" $link
"$work/serve" "$@"

compile() { # CASE: its errors in a log
  rustc --edition 2021 --crate-type lib --emit metadata --out-dir "$work" "$cases" --cfg "case=\"$1\"" \
    --extern "conclave=$work/libconclave.rlib" >"$work/$1.log" 2>&1
}
check() { # CASE CODE: compiles to this error
  if ! compile "$1" && grep -q "^error\[$2\]" "$work/$1.log"; then return; fi
  echo "case $1 is not refused with $2:"
  cat "$work/$1.log"
  exit 1
}
if ! compile none; then
  cat "$work/none.log"
  exit 1
fi
check source E0597
check in_place E0597
check refit E0597
check refit_of_threads E0277
check workspace_of_threads E0277
check workspace E0499
check out E0502
echo "what outlives its arrays or shares what it must not is refused"

if command -v cargo >/dev/null; then
  rm -rf "$work/copy"
  cp -r "$crate" "$work/copy" # cargo writes a lock file beside Cargo.toml
  (cd "$work/copy" && cargo build --quiet --offline --examples --target-dir "$work/target")
  "$work/target/debug/examples/serve" "$@"
else
  echo "no cargo in PATH: Cargo.toml and build.rs are not tried"
fi
