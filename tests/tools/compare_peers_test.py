#!/usr/bin/env python3
"""Drives bench/compare_peers.py with two small programs that print known rows."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

PROGRAM = """#!/usr/bin/env python3
import json, pathlib
count = pathlib.Path(__file__).with_suffix(".count")
run = int(count.read_text()) if count.exists() else 0
count.write_text(str(run + 1))
with open(pathlib.Path(__file__).with_name("order.txt"), "a") as order:
    order.write(pathlib.Path(__file__).stem + "\\n")
print("a line that is not JSON")
for row in json.loads(pathlib.Path(__file__).with_suffix(".rows").read_text())[run]:
    print(json.dumps(row))
raise SystemExit(int(pathlib.Path(__file__).with_suffix(".status").read_text()))
"""


def our_row(tokens: int, ms: float) -> dict:
    return {"model": "m", "tokens": tokens, "threads": 2, "isa": "avx512", "arithmetic": "f32-fma", "ms_mean": ms,
            "gflops": 100.0 / ms, "gbps": 40.0 / ms, "read_ceiling_gbps": 50.0, "fma_ceiling_gflops": 200.0}


def peer_row(name: str, tokens: int, ms: float) -> dict:
    return {"implementation": name, "model": "m", "tokens": tokens, "threads": 2, "ms_mean": ms,
            "torch": "1.0", "transformers": "2.0"}


class ComparePeersTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def compare(self, ours: list, peers: list, peer_status: int = 0) -> subprocess.CompletedProcess:
        for name, rows, status in (("ours", ours, 0), ("peers", peers, peer_status)):
            program = self.folder / f"{name}.py"
            program.write_text(PROGRAM)
            program.chmod(0o755)
            program.with_suffix(".rows").write_text(json.dumps(rows))
            program.with_suffix(".status").write_text(str(status))
        command = [sys.executable, str(ROOT / "bench/compare_peers.py"), "--conclave", str(self.folder / "ours.py"),
                   "--peer", str(self.folder / "peers.py"), "--rounds", str(len(ours)), "--output",
                   str(self.folder / "results")]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def report(self) -> dict:
        (path,) = (self.folder / "results").glob("*.json")
        return json.loads(path.read_text())

    def test_rounds_alternate_and_medians_are_compared(self):
        ours = [[our_row(1, ms), our_row(64, 10.0)] for ms in (2.0, 1.0, 4.0)]
        peers = [[peer_row("eager", 1, ms), peer_row("grouped_mm", 1, 9.0)] for ms in (5.0, 6.0, 7.0)]
        done = self.compare(ours, peers)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((self.folder / "order.txt").read_text().split(), ["ours", "peers"] * 3)
        (entry,) = self.report()["summary"]  # 64 tokens have no peer
        self.assertEqual((entry["ms"], entry["best_peer"], entry["best_peer_ms"]), (2.0, "eager", 6.0))
        self.assertAlmostEqual(entry["ratio"], 3.0)
        self.assertAlmostEqual(entry["read_share"], 20.0 / 50.0)
        self.assertAlmostEqual(entry["fma_share"], 50.0 / 200.0)

    def test_skipped_peer_rows_are_ignored(self):
        skipped = {"implementation": "batched_mm", "model": "m", "tokens": 1, "threads": 2, "skipped": "too large"}
        done = self.compare([[our_row(1, 2.0)]], [[skipped, peer_row("eager", 1, 3.0)]])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(list(self.report()["summary"][0]["peer_ms"]), ["eager"])

    def test_failing_program_ends_the_comparison(self):
        done = self.compare([[our_row(1, 2.0)]], [[peer_row("eager", 1, 3.0)]], peer_status=3)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("exit status 3", done.stderr)
        self.assertFalse((self.folder / "results").exists())

    def test_nothing_in_common_is_an_error(self):
        done = self.compare([[our_row(1, 2.0)]], [[peer_row("eager", 2, 3.0)]])
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("no token count", done.stderr)

    def test_ambiguous_rows_are_an_error(self):
        done = self.compare([[our_row(1, 2.0), our_row(1, 3.0)]], [[peer_row("eager", 1, 3.0)]])
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("two rows", done.stderr)


if __name__ == "__main__":
    unittest.main()
