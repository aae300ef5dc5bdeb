#!/usr/bin/env python3
"""Times our layer and other engines in pairs on an NVIDIA GPU; docs/benchmarking.md says how.

    PYTHONPATH=build/release/python python3 bench/h200/paired_bench.py --out paired.jsonl
    python3 bench/h200/paired_report.py paired.jsonl --markdown table.md
"""

from paired.bench import main

if __name__ == "__main__":
    main()
