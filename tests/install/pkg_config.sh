#!/bin/sh
# Usage: pkg_config.sh COMPILER PKGCONFIG_DIR SOURCE OUTPUT. Builds and runs SOURCE with the flags of
# the installed conclave.pc.
set -eu
export PKG_CONFIG_PATH="$2"
flags=$(pkg-config --cflags --libs conclave)
# Word splitting of the flags is meant.
# shellcheck disable=SC2086
"$1" -std=c++20 "$3" -o "$4" $flags
"$4"
