// Finds the kernels of a tile.
#pragma once

#include "experts/cuda/sm90/stream/launch.h"
#include "experts/cuda/sm90/tile_codes/tile_codes.h"

namespace conclave::inline v0::experts::tile_codes {

using KernelPair = stream::KernelPairOf<stream::CodedParams>;

// Codes of 4 bits, whose values bf16 holds.
KernelPair find_kernels_of_4_bits(const DeviceTile& tile);
// CodeOrder::kLanesOfNumbers; with zero points; with offsets; with scales and offsets in steps; and
// of rows that have one scale each.
KernelPair find_kernels_in_order(const DeviceTile& tile);
KernelPair find_kernels_in_order_with_zeros(const DeviceTile& tile);
KernelPair find_kernels_in_order_with_offsets(const DeviceTile& tile);
KernelPair find_kernels_in_order_with_steps(const DeviceTile& tile);
KernelPair find_kernels_of_rows_in_order(const DeviceTile& tile);
// Weights that bf16 holds, with scales that are powers of two, and of e4m3.
KernelPair find_kernels_of_powers(const DeviceTile& tile);
KernelPair find_kernels_of_floats(const DeviceTile& tile);
// With offsets or zero points.
KernelPair find_shifted_kernels_of_4_bits(const DeviceTile& tile);
// CodeOrder::kLanesOfPairs, and of rows that have one scale each.
KernelPair find_kernels_of_pairs(const DeviceTile& tile);
KernelPair find_kernels_of_rows_in_pairs(const DeviceTile& tile);
// Codes whose values take two terms: as stored, and in pairs with scales of 64 columns or more.
KernelPair find_kernels_of_two_terms(const DeviceTile& tile);
KernelPair find_kernels_of_pairs_in_terms(const DeviceTile& tile);
KernelPair find_kernels_of_8_bits(const DeviceTile& tile);
KernelPair find_shifted_kernels_of_8_bits(const DeviceTile& tile);
// FactorForm::kScaleSteps.
KernelPair find_kernels_of_8_bits_with_steps(const DeviceTile& tile);
// Codes of rows that have one scale each, with or without a zero point.
KernelPair find_kernels_of_4_bit_rows(const DeviceTile& tile);
KernelPair find_kernels_of_8_bit_rows(const DeviceTile& tile);

}  // namespace conclave::inline v0::experts::tile_codes
