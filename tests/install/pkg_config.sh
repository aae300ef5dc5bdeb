#!/bin/sh
# Usage: pkg_config.sh COMPILER STANDARD PKGCONFIG_DIR SOURCE OUTPUT [ARGUMENT]... Builds and runs SOURCE
# with the flags of the installed conclave.pc.
set -eu
compiler=$1 standard=$2 source=$4 output=$5
export PKG_CONFIG_PATH="$3"
shift 5
flags=$(pkg-config --cflags --libs conclave)
# Word splitting of the flags is meant.
# shellcheck disable=SC2086
"$compiler" "$standard" "$source" -o "$output" $flags
"$output" "$@"
