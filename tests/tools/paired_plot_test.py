"""bench/h200/paired_report.py --plot: the plot of the documentation is that of its data, and says of which."""

import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/h200"))

from paired import plot, report  # noqa: E402

DATE = "2026-11-22"
DATA = ROOT / f"bench/results/h200/{DATE}-paired.jsonl"
SVG = "{http://www.w3.org/2000/svg}"


class Plot(unittest.TestCase):
    def drawn(self, *options: str) -> str:
        with tempfile.TemporaryDirectory() as name:
            file = pathlib.Path(name) / "plot.svg"
            subprocess.run([sys.executable, ROOT / "bench/h200/paired_report.py", DATA, "--date", DATE, "--plot", file,
                            *options], check=True)
            return file.read_text(encoding="utf-8")

    def test_the_documentation_has_the_plot_of_its_data(self):
        page = (ROOT / "docs/benchmarking.md").read_text(encoding="utf-8")
        self.assertIn(f"{DATE}-paired.jsonl", page)
        self.assertEqual(self.drawn(), (ROOT / "docs/h200-speed.svg").read_text(encoding="utf-8"))

    def test_machine_commit_and_engines_are_named(self):
        words = " ".join(node.text for node in xml.etree.ElementTree.fromstring(self.drawn()).iter(f"{SVG}text"))
        for wanted in ("NVIDIA H200, commit 17117ca, 2026-11-22", "vLLM Triton: whole layer", "DeepGEMM: two bare products",
                       "Qwen3-30B-A3B, bf16", "DeepSeek-V3, e4m3 blocks", "17.8 ms"):
            self.assertIn(wanted, words)

    def test_points_are_ratios_of_medians(self):
        results = report.read([DATA])
        points = dict(plot.relative(results, "qwen3-30b", "vllm_triton"))
        self.assertEqual(sorted(points), [1, 16, 64, 256, 1024, 4096, 16384])
        self.assertAlmostEqual(points[1024], 413.419 / 358.56)
        self.assertEqual(set(dict(plot.relative(results, "qwen3-30b", "ours")).values()), {1.0})
        panel = plot.Panel(results, "qwen3-30b", 0, 0, 2)
        self.assertEqual(panel.place(1, 2)[1], 0)
        self.assertEqual(panel.place(16384, 0), (plot.PANEL - 14, plot.HEIGHT))

    def test_a_peer_without_figures_has_no_line(self):
        lines = self.drawn("--plot-cases", "deepseek-v3-fp8", "--plot-peers", "grouped_mm").count("<circle")
        self.assertEqual(lines, 7)  # ours alone


if __name__ == "__main__":
    unittest.main()
