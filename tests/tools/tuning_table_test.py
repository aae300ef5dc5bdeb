#!/usr/bin/env python3
"""Drives bench/h200/tuning_table.py with a small sweep, plans and layers."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parents[2] / "bench/h200/tuning_table.py"
STREAM = "cuda.stream_sm90 16x128x256B, 6 stages"
WIDE = "cuda.stream_sm90 32x128x256B, 5 stages"
TALL = "cuda.tile_sm90 192 tokens, up 192 s4 c2, down 192 s4 c2"
GATHERED = "cuda.tile_sm90 128 tokens, up 256 s4 c1 gathered, down 192 s4 c1"
PLANS = """small
device         cuda:0 NVIDIA H200, 132 multiprocessors
workspace      1.13 GiB for 16384 tokens
tokens         1 to 8       cuda.decode_sm90                              644.50 KiB  one launch
               9 to 64      cuda.stream_sm90  16x128x256B, 6 stages         2.50 MiB  least by the cost model
               65 to 16384  cuda.stream_sm90  32x128x256B, 5 stages         2.50 MiB  least by the cost model
small
tokens         1 to 16384   cuda.stream_sm90  64x128x256B, 4 stages         2.50 MiB  least by the cost model
"""


def cell(tokens: int, *timings: tuple) -> str:
    text = f"small T={tokens} E=8 k=2 H=512 I=256 bf16, 8 experts active\n"
    for kernel, microseconds in timings:
        text += f"  {kernel:<58} {microseconds:9.1f} us  4.41 TB/s   17.7 TFLOP/s floor 1.0 share 0.92 | worst 0\n"
    return text + "  cuda.stream_fp8_sm90: takes F8_E4M3 weights; found BF16\n"


def layer(tokens: int, kernel: str, microseconds: float, variant: str = "d1") -> str:
    return json.dumps({"case": "small", "variant": variant, "tokens": tokens, "us": microseconds, "kernel": kernel})


class TuningTableTest(unittest.TestCase):
    def run_tool(self, sweep: str, layers: str = "") -> tuple[int, list, str]:
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for name, text in (("sweep", sweep), ("plans", PLANS), ("layers", layers)):
                paths.append(pathlib.Path(folder) / name)
                paths[-1].write_text(text, encoding="utf-8")
            result = subprocess.run([sys.executable, TOOL, *paths, "--commit", "abc"], capture_output=True, text=True,
                                    check=False)
        lines = [line for line in result.stdout.splitlines() if not line.startswith("#")]
        self.assertEqual(lines[:1], ["conclave-tuning 1"][:len(lines)])
        return result.returncode, [line.split(" | ", 3)[3] for line in lines[1:]], result.stderr

    def expect(self, sweep: str, *entries: str, layers: str = ""):
        status, found, errors = self.run_tool(sweep, layers)
        self.assertEqual(status, 0, errors)
        self.assertEqual(found, list(entries))

    def test_fastest_is_taken_and_described_as_a_tile(self):
        self.expect(cell(256, (STREAM, 80.0), (WIDE, 90.0), (TALL, 70.0)) + cell(1024, (TALL, 9.0), (GATHERED, 8.0)),
                    "T 256 | cuda.tile_sm90 | 192x192x128B, 4 stages, cluster 2, sorted rows | 70.000",
                    "T 1024 | cuda.tile_sm90 | 128x256x128B, 4 stages | 8.000")

    def test_plan_wins_a_tie_and_only_that(self):
        self.expect(cell(16, (WIDE, 100.0), (STREAM, 103.0)),
                    "T 16 | cuda.stream_sm90 | 16x128x256B, 6 stages | 103.000")
        self.expect(cell(16, (WIDE, 100.0), (STREAM, 103.1)),
                    "T 16 | cuda.stream_sm90 | 32x128x256B, 5 stages | 100.000")

    def test_median_of_repeated_sweeps_counts(self):
        lucky = cell(16, (STREAM, 100.0), (WIDE, 80.0))
        again = cell(16, (STREAM, 100.0), (WIDE, 110.0))
        self.expect(lucky + again + again, "T 16 | cuda.stream_sm90 | 16x128x256B, 6 stages | 100.000")
        self.expect(lucky + lucky + again, "T 16 | cuda.stream_sm90 | 32x128x256B, 5 stages | 80.000",
                    layers=layer(16, STREAM, 110.0))

    def test_many_tokens_are_left_out(self):
        self.expect(cell(64, (STREAM, 5.0)) + cell(4096, (STREAM, 50.0)),
                    "T 64 | cuda.stream_sm90 | 16x128x256B, 6 stages | 5.000")

    def test_first_timing_loses_only_against_a_layer(self):
        cold = cell(16, (STREAM, 120.0), (WIDE, 100.0))
        self.expect(cold)
        self.expect(cold, "T 16 | cuda.stream_sm90 | 32x128x256B, 5 stages | 100.000", layers=layer(16, STREAM, 110.0))
        self.expect(cold, "T 16 | cuda.stream_sm90 | 16x128x256B, 6 stages | 95.000", layers=layer(16, STREAM, 95.0))
        self.expect(cold, layers=layer(16, STREAM, 95.0, variant="zipf"))

    def test_wrong_results_are_refused(self):
        sweep = cell(64, (STREAM, 5.0)).replace("worst 0", "worst 9 FAILED")
        status, _, errors = self.run_tool(sweep)
        self.assertEqual(status, 1)
        self.assertIn("wrong result", errors)

    def test_case_without_plan_is_named(self):
        status, _, errors = self.run_tool(cell(64, (STREAM, 5.0)).replace("small", "other"))
        self.assertEqual(status, 1)
        self.assertIn("no plan of other", errors)


if __name__ == "__main__":
    unittest.main()
