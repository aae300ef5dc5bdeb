#!/bin/bash
# Runs the Python package's GPU tests where there is one and writes the record of it:
#   bench/h200/python_tests.sh <folder that holds conclave/> <record>
# makes <record>.log and <record>.md. For a build with CONCLAVE_BUILD_PYTHON=ON that folder is
# build/release/python. Needs torch, pytest and pytest-timeout; transformers, cupy and hypothesis
# for the tests that use them. With pytest-xdist, JOBS (12) processes share the GPU.
set -uo pipefail
package=$(realpath "${1:?the folder that holds conclave/}")
record=$(realpath "${2:?the record to write, without .md and .log}")
cd "$(dirname "$0")/../.." || exit
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # the processes below share the cores
export PYTHONPATH=$package PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
pytest=(python3 -m pytest -q -rfE -m cuda -p no:cacheprovider --timeout=60 --tb=short -W ignore
        -o junit_logging=no)
python3 -c 'import xdist' 2>/dev/null && parallel=(-n "${JOBS:-12}") || parallel=()
# These measure how much of the GPU's memory is free, so nothing else may run.
alone=(python/tests/test_cuda.py python/tests/test_cuda_calls.py python/tests/test_cuda_growing.py)
{
  "${pytest[@]}" --junitxml="$results/alone.xml" "${alone[@]}"
  "${pytest[@]}" --junitxml="$results/rest.xml" "${parallel[@]}" python/tests \
    "${alone[@]/#/--deselect=}"
} 2>&1 | grep -vE '^SKIPPED'
python3 bench/h200/python_report.py "$results"/alone.xml "$results"/rest.xml \
  --log "$record.log" >"$record.md"
! grep -q '^Failed:' "$record.md"
