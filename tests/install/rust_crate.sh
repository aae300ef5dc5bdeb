#!/bin/sh
# Usage: rust_crate.sh LINKER PKGCONFIG_DIR CRATE WORK_DIR CASES MODEL ADAPTER RECORD. Builds the crate and its
# examples by rustc with the libraries of the installed conclave.pc and runs them, checks that CASES are
# refused one by one, and builds the same by cargo where it is there. Exit status 77 without rustc.
set -eu
linker=$1 crate=$3 work=$4 cases=$5
model=$6 adapter=$7 record=$8
export PKG_CONFIG_PATH="$2"
if ! command -v rustc >/dev/null; then
  echo "no rustc in PATH: the crate of Rust is not built (rustc of Debian 12 will do)"
  exit 77
fi
mkdir -p "$work"
link=''
for word in $(pkg-config --libs conclave) -lc; do link="$link -C link-arg=$word"; done
rustc --edition 2021 -D warnings --crate-type rlib --crate-name conclave "$crate/src/lib.rs" \
  -o "$work/libconclave.rlib"
# Word splitting of the options is meant. A static library asks for libc after Rust's own libraries.
# shellcheck disable=SC2086
for example in serve ranks; do
  rustc --edition 2021 -D warnings "$crate/examples/$example.rs" -o "$work/$example" -C "linker=$linker" \
    --extern "conclave=$work/libconclave.rlib" $link
done
run() { # PROGRAMS: their folder
  "$1/serve" "$model" "$adapter" "$record"
  rm -rf "$work/models" && mkdir "$work/models"
  "$1/ranks" "$model" "$work/models"
}
run "$work"

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
check context_of_ranks E0277
check layer_of_ranks E0277
check refit_of_ranks E0277
check communicator_of_threads E0277
check communicator_twice E0382
check communicator_of_refit E0499
check communicator_ends E0597
check broadcast_in_place E0599
check transport_of_one_thread E0277
check transport_ends E0310
echo "what outlives its arrays or shares what it must not is refused"

if command -v cargo >/dev/null; then
  rm -rf "$work/copy"
  cp -r "$crate" "$work/copy" # cargo writes a lock file beside Cargo.toml
  (cd "$work/copy" && cargo build --quiet --offline --examples --target-dir "$work/target")
  run "$work/target/debug/examples"
else
  echo "no cargo in PATH: Cargo.toml and build.rs are not tried"
fi
