#!/bin/bash
# Runs the Python package's GPU tests where there is one and writes the record of it:
#   bench/h200/python_tests.sh <folder that holds conclave/> <log>
# For a build with CONCLAVE_BUILD_PYTHON=ON that folder is build/release/python. Needs torch, pytest
# and pytest-timeout; transformers and cupy for the tests that use them. Every file has a process of
# its own: an error that takes the device's context down ends one of them only.
set -uo pipefail
package=$(realpath "${1:?the folder that holds conclave/}")
log=$(realpath "${2:?the log to write}")
cd "$(dirname "$0")/../.." || exit
export PYTHONPATH=$package PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
{
  python3 -c 'import sys, torch; print("Python", sys.version.split()[0], "torch", torch.__version__)'
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
} | tee "$log"
failed=0
for file in python/tests/test_cuda*.py; do
  timeout "${LIMIT:-60}" python3 -m pytest -q -m cuda -p no:cacheprovider --timeout=30 --tb=short \
    --durations=3 "$file" 2>&1 | tee -a "$log" || failed=1
done
exit $failed
