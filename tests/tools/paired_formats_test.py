#!/usr/bin/env python3
"""Formats and cases of bench/h200/paired; the codes themselves where torch is installed."""

import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/h200"))

from paired import cases, formats

try:
    import torch
except ImportError:
    torch = None


class FormatTableTest(unittest.TestCase):
    def test_weight_bits_count_scales(self):
        found = {name: row.weight_bits for name, row in formats.FORMATS.items()}
        mxfp4 = {"mxfp4": 4.25, "mxfp4_fp8": 4.25, "mxfp4_fp8_group": 4.25}
        self.assertEqual(found, {"bf16": 16, "e4m3": 8 + 32 / 16384, "int4": 4.125, **mxfp4, "nvfp4": 4.5})

    def test_unknown_format_is_refused_with_the_known_ones(self):
        for make in (lambda: formats.find("int3"), lambda: cases.parse_case("8x2x256x256:int3")):
            with self.assertRaisesRegex(ValueError, "unknown format 'int3': expected one of bf16, e4m3, int4, mxfp4"):
                make()

    def test_sizes_that_break_a_group_are_refused(self):
        with self.assertRaisesRegex(ValueError, "int4 needs multiples of 128, found H 2880 and I 2880"):
            cases.parse_case("32x4x2880x2880:int4")
        self.assertEqual(cases.parse_case("32x4x2880x2880:mxfp4").format, "mxfp4")

    def test_cases_are_named_by_size_and_format(self):
        self.assertEqual(cases.CASES["qwen3-30b-int4"], cases.Case("qwen3-30b-int4", 128, 8, 2048, 768, "int4"))
        self.assertEqual(cases.CASES["gpt-oss-20b-mxfp4"].format, "mxfp4")
        self.assertEqual(cases.parse_case("8x2x256x256").format, "bf16")


def e2m1(code: int) -> float:
    """By the fields of the code: a sign, two bits of exponent with bias 1, one of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -magnitude if code & 8 else magnitude


@unittest.skipUnless(torch, "torch is not installed")
class FourBitCodesTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(5)

    def all_codes(self, cols: int):
        """[2, cols / 2] bytes in which every code is first and second."""
        return torch.arange(256, dtype=torch.uint8).repeat(2 * cols // 512).view(2, cols // 2)

    def test_int4_code_is_its_value_plus_eight_low_bits_first(self):
        codes, scales = self.all_codes(512), torch.tensor([0.5, 0.25, 2.0, 1.0]).repeat(2, 1).bfloat16()
        found = formats.find("int4").codec.decode(codes, scales)
        self.assertEqual(found.dtype, torch.float64)
        for row, col in ((0, 0), (0, 1), (0, 130), (1, 131), (1, 300), (0, 511)):
            byte = int(codes[row, col // 2])
            value = (byte >> 4 if col % 2 else byte & 15) - 8
            self.assertEqual(float(found[row, col]), value * float(scales[row, col // 128]), (row, col))

    def test_mxfp4_code_is_e2m1_times_a_power_of_two(self):
        codes, scales = self.all_codes(512), torch.arange(117, 149, dtype=torch.uint8).view(2, 16)
        scales[0, 0], scales[1, 15] = 0, 254
        found = formats.find("mxfp4").codec.decode(codes, scales)
        for row in range(2):
            for col in range(512):
                byte = int(codes[row, col // 2])
                value = e2m1(byte >> 4 if col % 2 else byte & 15)
                self.assertEqual(float(found[row, col]), value * 2.0 ** (int(scales[row, col // 32]) - 127), (row, col))

    def test_int4_loses_at_most_half_a_step(self):
        matrix = torch.randn(6, 384).bfloat16()
        codes, scales = formats.find("int4").codec.encode(matrix)
        self.assertEqual((codes.shape, scales.shape, scales.dtype), ((6, 192), (6, 3), torch.bfloat16))
        lost = (formats.find("int4").codec.decode(codes, scales) - matrix.double()).abs()
        # The scale is rounded to eight bits, which moves the largest of a group by 7.5 / 256 of a step.
        steps = lost.unflatten(-1, (-1, 128)) / scales.double()[..., None]
        self.assertLess(float(steps.max()), 0.53)

    def test_mxfp4_takes_the_nearest_code(self):
        matrix = torch.randn(6, 96).bfloat16() * 0.02
        codec = formats.find("mxfp4").codec
        codes, scales = codec.encode(matrix)
        self.assertEqual((codes.shape, scales.shape, scales.dtype), ((6, 48), (6, 3), torch.uint8))
        found = codec.decode(codes, scales)
        for row in range(6):
            for col in range(96):
                scale = 2.0 ** (int(scales[row, col // 32]) - 127)
                nearest = min((e2m1(code) * scale for code in range(16)), key=lambda v: abs(v - float(matrix[row, col])))
                self.assertEqual(abs(float(found[row, col]) - float(matrix[row, col])), abs(nearest - float(matrix[row, col])))

    def test_mxfp4_values_survive_another_round(self):
        codec = formats.find("mxfp4").codec
        once = codec.decode(*codec.encode(torch.randn(6, 96)))
        self.assertTrue(torch.equal(codec.decode(*codec.encode(once)), once))

    def test_rows_beside_mxfp4_are_e4m3_of_a_row_or_of_its_groups(self):
        rows = torch.randn(3, 160, dtype=torch.float64)
        rows[1, :128] *= 1e-5
        of_rows, of_groups = (formats.find(f"mxfp4_fp8{end}").codec.rows_as_read(rows) for end in ("", "_group"))
        for found, begin, end in ((of_rows, 0, 160), (of_groups, 0, 128), (of_groups, 128, 160)):
            part = rows[:, begin:end]
            step = (part.float().abs().amax(-1, keepdim=True) / 448).double()
            codes = (part.float() / step.float()).to(torch.float8_e4m3fn).double()
            self.assertTrue(torch.equal(found[:, begin:end], codes * step), (begin, end))
        # A row's small columns are lost beside its large ones, a group's are not.
        lost = [(found[1, :128] - rows[1, :128]).norm() / rows[1, :128].norm() for found in (of_rows, of_groups)]
        self.assertGreater(float(lost[0]), 0.3)
        self.assertLess(float(lost[1]), 0.05)

    def test_group_of_zeros_stays_zero(self):
        for name in ("int4", "mxfp4"):
            codec = formats.find(name).codec
            self.assertEqual(float(codec.decode(*codec.encode(torch.zeros(2, 128))).abs().max()), 0.0, name)

    def test_every_format_makes_weights_and_reads_them(self):
        from paired.problem import Problem, Weights

        for name, row in formats.FORMATS.items():
            case = cases.parse_case(f"3x2x256x128:{name}")
            weights = Weights(case, device="cpu")
            self.assertEqual(weights.exact("gate_up", 2).shape, (256, 256), name)
            problem = Problem(case, 5, weights, device="cpu")
            outputs = [self.layer(problem, j) for j in range(problem.routings)]
            self.assertLess(problem.layer_error(outputs), row.limit, name)
            outputs[0][4] *= 1 + 4 * row.limit
            self.assertGreater(problem.layer_error(outputs), row.limit, name)

    def layer(self, problem, routing: int):
        return torch.stack([problem._token(routing, token) for token in range(problem.tokens)]).bfloat16()


if __name__ == "__main__":
    unittest.main()
