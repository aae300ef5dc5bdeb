#!/usr/bin/env python3
"""Tests of tools/make_quantised.py: its codes, and folders remade with the packages that are installed.

Exits with 77, which ctest reports as skipped, where numpy, torch or safetensors are missing.
"""

import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 77
# Made by the tool and transformers alone.
OWN = ["deepseek_v3-fp8-block", "mixtral-modelopt-fp8", "gpt_oss-mxfp4", "deepseek_v4-fp4"]


class CodesTest(unittest.TestCase):
    def test_codes_come_back_from_their_words(self):
        for width in (2, 3, 4, 6, 8):
            codes = np.arange(3 * 32).reshape(3, 32) * 7 % (1 << width)
            words = torch.from_numpy(bits.words_of(codes, width))
            np.testing.assert_array_equal(bits.codes_of(words, width, 32), codes)

    def test_first_code_lies_in_the_lowest_bits(self):
        self.assertEqual(bits.codes_of(torch.tensor([[0x21]], dtype=torch.uint8), 4, 2).tolist(), [[1, 2]])

    def test_small_floats_have_their_published_values(self):
        self.assertEqual(bits.E2M1[:8].tolist(), [0, 0.5, 1, 1.5, 2, 3, 4, 6])
        self.assertEqual((bits.E2M3.max(), bits.E2M3[1]), (7.5, 0.125))
        self.assertEqual((bits.E3M2.max(), bits.E3M2[1]), (28, 0.0625))

    def test_nearest_code_takes_the_even_one_of_a_tie(self):
        values = np.array([0.25, 0.75, 1.25, 2.5, 5.0, 100, -0.75, -6])
        self.assertEqual(bits.nearest_codes(values, bits.E2M1).tolist(), [0, 2, 2, 4, 6, 7, 10, 15])

    def test_every_value_is_its_own_nearest(self):
        for table in (bits.E2M1, bits.E2M3, bits.E3M2):
            np.testing.assert_array_equal(table[bits.nearest_codes(table, table)], table)

    def test_last_group_may_be_partial(self):
        self.assertEqual(bits.spread(np.array([[1, 2]]), 3, 5).tolist(), [[1, 1, 1, 2, 2]])


class FoldersTest(unittest.TestCase):
    def test_every_folder_has_its_recipe_and_its_row(self):
        folders = sorted(path.name for path in make_quantised.MODELS.iterdir() if path.is_dir())
        self.assertEqual(folders, sorted(make_quantised.CASES))
        table = (make_quantised.MODELS / "README.md").read_text()
        self.assertEqual([name for name in folders if f"| `{name}` |" not in table], [])

    def test_remade_folder_has_the_committed_bytes(self):
        for name in OWN:
            with self.subTest(name=name):
                self.assertEqual(make_quantised.check(name, make_quantised.CASES[name]()), [])

    def test_changed_configuration_is_reported(self):
        class Changed(make_quantised.CASES["gpt_oss-mxfp4"]):
            limit = 3.0

        self.assertEqual(make_quantised.check("gpt_oss-mxfp4", Changed()), ["gpt_oss-mxfp4/config.json differs"])

    def test_weights_that_the_package_decodes_otherwise_are_refused(self):
        class Wrong(make_quantised.CASES["gpt_oss-mxfp4"]):
            def expert(self, disk, number):
                return {part: 2 * weight for part, weight in super().expert(disk, number).items()}

        with tempfile.TemporaryDirectory() as scratch, self.assertRaisesRegex(ValueError, "differ by"):
            Wrong().make(pathlib.Path(scratch))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import numpy as np
        import safetensors  # noqa: F401
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        print(f"skipped: {error}")
        raise SystemExit(SKIPPED) from error
    import make_quantised
    from quantised import bits

    unittest.main()
