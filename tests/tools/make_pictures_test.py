"""tools/make_pictures.py: the committed pictures are what the committed records make, and show what these say."""

import pathlib
import subprocess
import sys
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from pictures import cpu, drawing, formats, h200, records  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"


def words_of(drawn: str) -> list:
    return [node.text for node in xml.etree.ElementTree.fromstring(drawn).iter(f"{SVG}text")]


def shades(drawn: str, shape: str) -> list:
    found = [node.get("class") for node in xml.etree.ElementTree.fromstring(drawn).iter(SVG + shape)]
    return [name for name in found if name in ("ahead", "behind")]


class Pictures(unittest.TestCase):
    def test_the_committed_pictures_are_those_of_the_records(self):
        done = subprocess.run([sys.executable, ROOT / "tools/make_pictures.py", "--check"], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))

    def test_every_picture_is_on_the_first_page_and_on_that_of_speed(self):
        for page, folder in (("README.md", "docs/pictures"), ("docs/speed.md", "pictures")):
            text = (ROOT / page).read_text(encoding="utf-8")
            for file in sorted((ROOT / "docs/pictures").glob("*.svg")):
                self.assertIn(f"]({folder}/{file.name})", text)

    def test_a_dot_is_a_cell_of_the_records_and_losses_are_shown(self):
        cells = [ratio for _, _, peer, files in h200.PANELS for found in h200.ratios(peer, files).values() for ratio in found]
        drawn = shades(h200.draw(), "circle")
        self.assertEqual(len(drawn), len(cells))
        self.assertEqual(drawn.count("behind"), sum(ratio <= 1 for ratio in cells))
        self.assertGreater(drawn.count("behind"), 0)
        self.assertAlmostEqual(h200.ratios("vllm_triton", h200.BFLOAT_AND_E4M3)[1024][0], 1.24, delta=0.01)  # deepseek-v3-fp8
        self.assertLess(max(cells), h200.HIGHEST)
        self.assertIn("ours is faster in 62 of 62", words_of(h200.draw()))

    def test_a_later_record_replaces_an_earlier_one(self):
        earlier, later = (records.paired(name).ratio("mixtral-8x7b-int4", 1, "humming") for name in h200.FOUR_BITS[-2:])
        self.assertNotEqual(earlier, later)
        self.assertIn(later, h200.ratios("humming", h200.FOUR_BITS)[1])
        self.assertNotIn(earlier, h200.ratios("humming", h200.FOUR_BITS)[1])

    def test_bars_begin_at_zero_and_have_their_figure(self):
        panels, words = cpu.panels(), words_of(cpu.draw())
        ratios = [ratio for _, _, groups in panels for _, cells in groups for _, ratio in cells]
        self.assertEqual(len(shades(cpu.draw(), "rect")), len(ratios))
        for ratio in ratios:
            self.assertIn(f"{ratio:.2f}", words)
            self.assertLess(ratio, cpu.HIGHEST)
        # Q6_K with one token, of the table of 2026-11-28-cpu-ggml.md
        self.assertAlmostEqual(dict(dict(panels[2][2])["Q6_K"])[1], 0.68, delta=0.005)
        self.assertEqual(dict(dict(panels[1][2])["int4"])[4096], 0.69)
        self.assertEqual(cpu.height_of(100, 0), 100 + cpu.TALL)

    def test_formats_have_the_figures_of_their_records(self):
        gpu, host = formats.gpu_columns(), formats.cpu_columns()
        self.assertEqual([round(value) for value in gpu[0][2]], [1208, 604, 340, 321, 311])
        self.assertAlmostEqual(gpu[3][2][0], 2446.912)
        self.assertEqual(host[1][2][0], records.median([0.83, 0.69, 0.76, 0.88]))
        self.assertEqual(shades(formats.draw(), "rect").count("behind"), 3 + 5)

    def test_both_schemes_have_every_colour(self):
        style = drawing.style()
        light, dark = style.split("@media (prefers-color-scheme: dark)")
        for name in drawing.COLOURS:
            self.assertTrue(f".{name}{{" in light and f".{name}{{" in dark)
        for draw in (h200.draw, cpu.draw, formats.draw):
            used = {word for node in xml.etree.ElementTree.fromstring(draw()).iter() for word in (node.get("class") or "").split()}
            self.assertLessEqual({word.removeprefix("line-") for word in used}, set(drawing.COLOURS))

    def test_a_record_without_its_table_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "0 tables"):
            records.table_after("2026-11-28-cpu-amx-kt-kernel.md", ("no", "such"))
        with self.assertRaisesRegex(ValueError, "no such cell"):
            records.median([])


if __name__ == "__main__":
    unittest.main()
