#!/bin/sh
# Usage: rust.sh LINKER PKGCONFIG_DIR SOURCE OUTPUT [ARGUMENT]... Builds and runs SOURCE by rustc with the
# libraries of the installed conclave.pc. Exit status 77 where there is no rustc.
set -eu
linker=$1 source=$3 output=$4
export PKG_CONFIG_PATH="$2"
shift 4
if ! command -v rustc >/dev/null; then
  echo "no rustc in PATH: the example of Rust is not built (rustc of Debian 12 will do)"
  exit 77
fi
link=''
for word in $(pkg-config --libs conclave) -lc; do link="$link -C link-arg=$word"; done
# Word splitting of the options is meant. A static library asks for libc after Rust's own libraries.
# shellcheck disable=SC2086
rustc --edition 2021 -O "$source" -o "$output" -C "linker=$linker" $link
"$output" "$@"
