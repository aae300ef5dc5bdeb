#!/usr/bin/env python3
"""The four-bit peers of bench/h200/paired on a CPU: layouts, what they hand to their operators, and why they are absent.

Exits with 77, which ctest reports as skipped, where torch is not installed.
"""

import contextlib
import io
import itertools
import json
import os
import pathlib
import sys
import types
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 77
sys.path.insert(0, str(ROOT / "bench/h200"))

try:
    import torch
except ImportError:
    print("skipped: torch is not installed")
    sys.exit(SKIPPED)

from paired import cases, plugin
from paired.formats import _nibbles
from paired.peers import _humming, _marlin_layout, _vllm_align, humming, marlin
from paired.problem import Problem, Weights, activated


def small_problem(name: str, tokens: int = 5) -> Problem:
    case = cases.parse_case(name)
    return Problem(case, tokens, Weights(case, device="cpu"), device="cpu")


class TorchHelpers:
    """peers/_triton_helpers.py by torch."""

    @staticmethod
    def activate(case, both, out):
        out.copy_(activated(case, *both.float().chunk(2, -1)))

    @staticmethod
    def sum_choices(rows, out, choices, weights=None):
        split = rows.float().unflatten(0, (-1, choices))
        out.copy_((split if weights is None else split * weights[..., None]).sum(1))


def error_of(layer, problem) -> float:
    return problem.layer_error([layer.run(index) for index in range(problem.routings)])


def place_of_code(row: int, col: int, rows: int) -> tuple:
    """(line, word, nibble) of a code in Marlin's layout, from the fragment of B of mma.m16n8k16 and the order in which
    pairs of codes are turned into pairs of bf16."""
    lane = 4 * (row % 8) + col % 8 // 2
    word = row // 64 * 128 + 4 * lane + row % 64 // 16
    # A lane has two fragments of eight rows, each with two registers of two columns that follow each other.
    fragment, register, half = row % 16 // 8, col % 16 // 8, col % 2
    return col // 16, word, 4 * half + 2 * fragment + register


def codes_of(words) -> "torch.Tensor":
    """[R, C] from Marlin's layout, one by one."""
    rows, cols = words.shape[1] // 2, words.shape[0] * 16
    lists = [[word & 0xFFFFFFFF for word in line] for line in words.tolist()]
    codes = torch.empty(rows, cols, dtype=torch.uint8)
    for row in range(rows):
        for col in range(cols):
            line, word, nibble = place_of_code(row, col, rows)
            codes[row, col] = lists[line][word] >> 4 * nibble & 15
    return codes


def place_of_scale(row: int, is_byte: bool) -> int:
    place = row // 64 * 64 + row % 8 * 8 + row % 64 // 8
    return place // 4 * 4 + (0, 2, 1, 3)[place % 4] if is_byte else place


def scales_of(packed, is_byte: bool) -> "torch.Tensor":
    """[R, G] from Marlin's layout, one by one."""
    groups, rows = packed.shape
    out = packed.new_empty(rows, groups)
    for row in range(rows):
        out[row] = packed[:, place_of_scale(row, is_byte)]
    return out


class MarlinLayoutTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(7)

    def test_every_code_has_a_place_of_its_own(self):
        rows, cols = 128, 48
        places = {place_of_code(row, col, rows) for row in range(rows) for col in range(cols)}
        self.assertEqual(places, set(itertools.product(range(cols // 16), range(2 * rows), range(8))))

    def test_packing_puts_each_code_there(self):
        codes = torch.randint(0, 16, (128, 48), dtype=torch.uint8)
        packed = _marlin_layout.pack_codes(_nibbles.pack(codes))
        self.assertEqual((packed.shape, packed.dtype), ((3, 256), torch.int32))
        self.assertTrue(torch.equal(codes_of(packed), codes))

    def test_scales_keep_their_rows_and_groups(self):
        scales = torch.randperm(128 * 5).view(128, 5).to(torch.int32)
        for pack, is_byte in ((_marlin_layout.pack_scales, False), (_marlin_layout.pack_scale_bytes, True)):
            self.assertTrue(torch.equal(scales_of(pack(scales), is_byte), scales))

    def test_one_group_a_row_is_refused(self):
        with self.assertRaisesRegex(ValueError, "expected at least two groups a row"):
            _marlin_layout.pack_scales(torch.zeros(64, 1))

    def test_padding_keeps_gate_and_up_apart(self):
        padded = _marlin_layout.pad(torch.arange(1, 13).view(4, 3), 2, 3, 4)
        self.assertEqual(padded.tolist(), [[1, 2, 3, 0], [4, 5, 6, 0], [0] * 4, [7, 8, 9, 0], [10, 11, 12, 0], [0] * 4])


class MarlinOperator:
    """moe_wna16_marlin_gemm as vLLM 0.26.0 declares it, in float64 from Marlin's layout."""

    def __init__(self, codec, is_byte: bool):
        self.codec, self.is_byte, self.calls, self.matrices = codec, is_byte, [], {}

    def matrix(self, codes, scales, expert: int):
        """A stack's expert, read once: that is slow."""
        key = (codes.data_ptr(), expert)
        if key not in self.matrices:
            split = scales_of(scales[expert], self.is_byte)
            self.matrices[key] = self.codec.decode(_nibbles.pack(codes_of(codes[expert])), split)
        return self.matrices[key]

    def moe_wna16_marlin_gemm(
        self, a, c_or_none, b_q_weight, b_bias_or_none, b_scales, a_scales, global_scale, b_zeros_or_none, g_idx_or_none,
        perm_or_none, workspace, sorted_token_ids, expert_ids, num_tokens_past_padded, topk_weights, moe_block_size, top_k,
        mul_topk_weights, b_type_id, size_m, size_n, size_k, is_full_k, use_atomic_add, use_fp32_reduce, is_zp_float,
        thread_k, thread_n, blocks_per_sm,
    ):
        self.calls.append((b_type_id, size_m, size_n, size_k, moe_block_size, is_full_k, use_fp32_reduce))
        scales = b_scales.view(torch.uint8) if self.is_byte else b_scales
        for at in range(int(num_tokens_past_padded)):
            slot, expert = int(sorted_token_ids[at]), int(expert_ids[at // moe_block_size])
            if slot >= size_m * top_k:
                continue
            value = self.matrix(b_q_weight, scales, expert) @ a[slot // top_k].double()
            c_or_none[slot] = value * topk_weights.flatten()[slot] if mul_topk_weights else value


class MarlinPeerTest(unittest.TestCase):
    def layer(self, problem, block: int):
        row = problem.case.weight_format
        operator = MarlinOperator(row.codec, row.scale_bits == 8)
        device, weights = types.SimpleNamespace(multi_processor_count=2), marlin.Weights(problem.weights)
        with mock.patch.object(torch.cuda, "get_device_properties", return_value=device):
            layer = marlin.Layer(operator, _vllm_align.align_by_torch, TorchHelpers, problem, weights, block)
        return layer, operator

    def test_layer_is_the_exact_one(self):
        for name in ("3x2x256x256:int4", "3x1x256x256:int4", "3x2x256x128:mxfp4"):
            problem = small_problem(name)
            layer, operator = self.layer(problem, 8)
            self.assertLess(error_of(layer, problem), problem.case.weight_format.limit, name)
            self.assertTrue(all(call[4:] == (8, True, True) for call in operator.calls))

    def test_odd_sizes_are_padded_and_cut_again(self):
        problem = small_problem("2x2x192x96:mxfp4", tokens=3)
        layer, operator = self.layer(problem, 8)
        self.assertLess(error_of(layer, problem), problem.case.weight_format.limit)
        self.assertEqual([call[1:4] for call in operator.calls[:2]], [(3, 256, 256), (6, 256, 128)])
        self.assertEqual(layer.run(0).shape, (3, 192))

    def test_types_have_the_numbers_of_vllm(self):
        # ScalarType.id of uint4b8 and float4_e2m1f in vLLM 0.26.0.
        self.assertEqual(marlin.KINDS["int4"].type_id, 1125899907892224)
        self.assertEqual(marlin.KINDS["mxfp4"].type_id, 562949953487106)

    def test_blocks_are_those_of_vllm_with_their_neighbours(self):
        for tokens, found in ((1, [8, 16]), (128, [16, 8, 32]), (512, [48, 32, 64]), (16384, [64, 48])):
            self.assertEqual([block for _, block in marlin.blocks(tokens, 8, 128)], found, tokens)


class FakeEngine:
    """Humming's interface over exact products; codes and scales are taken as they come."""

    weight_schema = dict

    def __init__(self, codec, scale_dtype):
        self.codec, self.scale_dtype = codec, scale_dtype
        self.heuristics = lambda config, shape_m, gemm_type: {"block_shape": [8 if shape_m < 20 else 16, 128, 64]}

    def prepare_layer_config(self, **given):
        return types.SimpleNamespace(**given, to_str=lambda: str(given))

    def transform_tensors(self, config, tensors):
        assert tensors["weight"].dtype == torch.int32 and tensors["weight_scale"].dtype == self.scale_dtype
        assert tensors["weight"].shape[1:] == (config.shape_n, config.shape_k // 8)
        return tensors

    def prepare_kernels(self, layer_config, compute_config, tuning_config):
        return layer_config, compute_config, tuning_config

    def launch(self, *, configs, inputs, outputs, weight, weight_scale, locks, valid_shape_m, sorted_ids=None, expert_ids=None,
               num_tokens_padded=None, expert_layout=None, top_k=1):
        assert valid_shape_m == len(outputs)
        scales = weight_scale.view(torch.uint8) if weight_scale.dtype == torch.float8_e8m0fnu else weight_scale
        exact = [self.codec.decode(w.view(torch.uint8), s) for w, s in zip(weight, scales)]
        if expert_layout is not None:
            for expert in range(len(exact)):
                held = slice(int(expert_layout[expert]), int(expert_layout[expert + 1]))
                outputs[held] = (inputs[held].double() @ exact[expert].T).to(outputs.dtype)
            return
        block = json.loads(configs[2])["block_shape"][0]
        for at in range(int(num_tokens_padded)):
            slot = int(sorted_ids[at])
            if slot < len(outputs):
                outputs[slot] = (exact[int(expert_ids[at // block])] @ inputs[slot // top_k].double()).to(outputs.dtype)


class PermutingOperators:
    """moe_permute and moe_unpermute as vLLM 0.26.0 declares them."""

    @staticmethod
    def moe_permute(input, topk_ids, token_expert_indices, expert_map, n_expert, n_local_expert, topk, permuted_input,
                    expert_first_token_offset, inv_permuted_idx, permuted_idx):
        order = torch.sort(topk_ids.flatten(), stable=True).indices
        permuted_input.copy_(input[order // topk])
        counts = torch.bincount(topk_ids.flatten().long(), minlength=n_expert)
        expert_first_token_offset.copy_(torch.cat((counts.new_zeros(1), counts.cumsum(0))))
        inv_permuted_idx.view(-1)[order] = torch.arange(len(order), dtype=torch.int32)
        permuted_idx.copy_(order)

    @staticmethod
    def moe_unpermute(permuted_hidden_states, topk_weights, inv_permuted_idx, expert_first_token_offset, topk, hidden_states):
        rows = permuted_hidden_states.float()[inv_permuted_idx.long()].unflatten(0, (-1, topk))
        hidden_states.copy_((rows * topk_weights[..., None]).sum(1))


class HummingPeerTest(unittest.TestCase):
    def parts(self, problem, kinds: list):
        engine = FakeEngine(problem.case.weight_format.codec, _humming.SCHEMAS[problem.case.format][2])
        products = {name: _humming.Product(engine, problem.weights, name) for name in humming.NAMES}
        kernels = _humming.Kernels(engine)
        for choice in humming.choices(products, problem.tokens * problem.case.top_k, kinds):
            asked = {name: kernels.ask(products[name], choice.kind, choice.tunings[name]) for name in humming.NAMES}
            yield choice, (TorchHelpers, problem, products, choice, asked)

    def test_layers_are_the_exact_one(self):
        for name in ("3x2x256x128:int4", "3x2x192x96:mxfp4", "3x1x256x128:mxfp4"):
            problem = small_problem(name, tokens=9)
            for choice, parts in self.parts(problem, [humming.INDEXED, humming.GROUPED]):
                if choice.kind == humming.INDEXED:
                    layer = humming.Indexed(_vllm_align.align_by_torch, *parts)
                else:
                    layer = humming.Grouped(PermutingOperators, *parts)
                self.assertLess(error_of(layer, problem), problem.case.weight_format.limit, (name, choice.label))

    def test_choices_of_other_row_counts_count_once_where_they_agree(self):
        problem = small_problem("3x2x256x128:int4", tokens=9)
        labels = [choice.label for choice, _ in self.parts(problem, [humming.INDEXED])]
        self.assertEqual(labels, ["indexed", "indexed, of twice the rows"])

    def test_failing_heuristics_leave_the_others(self):
        def tuning(rows, kind):
            if rows == 36:
                raise AssertionError("no tile fits")
            return {"block_shape": [rows, 1, 1]}

        product = types.SimpleNamespace(tuning=tuning)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            found = humming.choices({name: product for name in humming.NAMES}, 18, [humming.INDEXED])
        self.assertEqual([choice.label for choice in found], ["indexed", "indexed, of half the rows"])
        self.assertIn("of twice the rows: AssertionError: no tile fits", printed.getvalue())

    def test_e8m0_is_padded_by_ones_meanwhile(self):
        plain = torch.nn.functional.pad
        scale = torch.tensor([120], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        with _humming.padding_of_e8m0():
            found = torch.nn.functional.pad(scale, pad=(0, 2), value=1)
            floats = torch.nn.functional.pad(torch.ones(1), (1, 0))
        self.assertEqual(found.view(torch.uint8).tolist(), [120, 127, 127])
        self.assertEqual(floats.tolist(), [0, 1])
        self.assertIs(torch.nn.functional.pad, plain)

    def test_kernel_is_compiled_once(self):
        problem = small_problem("2x1x256x128:int4")
        engine = FakeEngine(problem.case.weight_format.codec, torch.bfloat16)
        product, kernels = _humming.Product(engine, problem.weights, "down"), _humming.Kernels(engine)
        asked = [kernels.ask(product, kind, {"a": 1}) for kind in ("indexed", "indexed", "grouped_contiguous")]
        self.assertIs(asked[0], asked[1])
        self.assertIsNot(asked[0], asked[2])
        self.assertIn('"gemm_type": "indexed"', asked[0].result()[1])


class AbsentPeersTest(unittest.TestCase):
    def reason(self, name: str, **variables: str) -> str:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PAIRED_")}
        with mock.patch.dict(os.environ, {**kept, **variables}, clear=True):
            peer = plugin.find(name)
        self.assertIsNone(peer.candidates)
        beside_fp8 = ("mxfp4_fp8", "mxfp4_fp8_group") if name == "humming" else ()
        self.assertEqual(peer.formats, ("int4", "mxfp4", *beside_fp8, "nvfp4"))
        return peer.reason

    def test_marlin_wants_the_operators(self):
        self.assertEqual(self.reason("marlin"), "PAIRED_VLLM_OPS names no library of vLLM's MoE operators")

    def test_library_that_cannot_be_loaded_is_named(self):
        found = self.reason("marlin", PAIRED_VLLM_OPS="/nowhere/ops.so")
        self.assertRegex(found, "^PAIRED_VLLM_OPS=/nowhere/ops.so cannot be loaded: .*/nowhere/ops.so")

    def test_library_without_the_operator_is_refused(self):
        with mock.patch.object(torch.ops, "load_library"):
            found = self.reason("marlin", PAIRED_VLLM_OPS="/some/ops.so")
        self.assertEqual(found, "PAIRED_VLLM_OPS=/some/ops.so has no operator moe_wna16_marlin_gemm: another version of vLLM?")

    def test_humming_wants_the_package(self):
        with mock.patch.dict(sys.modules, {"humming": None}):
            found = self.reason("humming")
        self.assertRegex(found, "^humming cannot be imported .*; PAIRED_HUMMING may name its folder$")


if __name__ == "__main__":
    unittest.main()
