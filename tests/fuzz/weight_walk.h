// Reads every weight of a layer, whole and in slices.
#pragma once

#include "core/weight_types.h"
#include "fuzz/promises.h"

#include "conclave/quantise.h"
#include "conclave/spec.h"
#include "conclave/weights.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

namespace conclave::testing {

// The bytes of each matrix and its values, in the order of the walk; empty where reading failed.
using DecodedWeights = std::vector<std::vector<std::byte>>;

inline std::optional<std::vector<std::byte>> read_weight(const WeightSource& source, WeightId id,
                                                         int64_t expert, const WeightBlock& block) {
  const DType dtype = source.describe(id).dtype;
  std::vector<std::byte> bytes(static_cast<size_t>(
      (block.row_end - block.row_begin) * packed_bytes(dtype, block.col_end - block.col_begin)));
  const auto problem = expect_value_or_error([&] { source.read(id, expert, block, bytes); });
  return problem ? std::nullopt : std::optional(std::move(bytes));
}

inline std::optional<std::vector<float>> read_floats(const MoeSpec& spec,
                                                     const WeightSource& source, WeightId id,
                                                     int64_t expert, const WeightBlock& block) {
  std::vector<float> values(
      static_cast<size_t>((block.row_end - block.row_begin) * (block.col_end - block.col_begin)));
  const auto problem =
      expect_value_or_error([&] { read_values(spec.quant, source, id, expert, block, values); });
  return problem ? std::nullopt : std::optional(std::move(values));
}

// Blocks that lie differently to bytes, words, groups and blocks of codes.
inline std::vector<WeightBlock> slices_of(const WeightInfo& info) {
  const int64_t row = info.rows / 3;
  const int64_t col = info.cols / 3 | 1;
  return {{row, info.rows, 0, info.cols},
          {0, info.rows, std::min(col, info.cols), info.cols},
          {row, std::min(row + 1, info.rows), std::min<int64_t>(2, info.cols), info.cols / 2 + 1},
          {0, 0, 0, info.cols},
          {0, info.rows, info.cols, info.cols}};
}

// Codes of rows [rows, cols] each of which begins a byte, as numbers of their bits. A code of 6
// bits may lie in two bytes.
inline uint8_t code_at(const std::vector<std::byte>& bytes, DType dtype, int64_t cols, int64_t row,
                       int64_t col) {
  const int64_t bits = bit_size(dtype);
  const int64_t first = col * bits;
  const auto byte = static_cast<size_t>(row * packed_bytes(dtype, cols) + first / 8);
  auto pair = std::to_integer<unsigned>(bytes[byte]);
  if (first % 8 + bits > 8) pair |= std::to_integer<unsigned>(bytes[byte + 1]) << 8U;
  return static_cast<uint8_t>(pair >> (first % 8) & ((1U << bits) - 1U));
}

inline bool is_part(const std::vector<std::byte>& whole, const std::vector<std::byte>& part,
                    const WeightInfo& info, const WeightBlock& block) {
  const int64_t cols = block.col_end - block.col_begin;
  const int64_t bits = bit_size(info.dtype);
  for (int64_t row = block.row_begin; row < block.row_end; ++row) {
    if (bits < 8) {
      for (int64_t col = 0; col < cols; ++col) {
        const uint8_t expected = code_at(whole, info.dtype, info.cols, row, block.col_begin + col);
        if (code_at(part, info.dtype, cols, row - block.row_begin, col) != expected) return false;
      }
      continue;
    }
    const auto at = static_cast<size_t>((row * info.cols + block.col_begin) * bits / 8);
    const auto to = static_cast<size_t>((row - block.row_begin) * cols * bits / 8);
    if (cols > 0 && std::memcmp(&whole[at], &part[to], static_cast<size_t>(cols * bits / 8)) != 0) {
      return false;
    }
  }
  return true;
}

// Slices of what can be read can be read, and are part of it.
inline void check_slices(const MoeSpec& spec, const WeightSource& source, WeightId id,
                         int64_t expert, const std::vector<std::byte>& whole,
                         const std::optional<std::vector<float>>& values) {
  const WeightInfo info = source.describe(id);
  for (const WeightBlock& block : slices_of(info)) {
    const auto part = read_weight(source, id, expert, block);
    promise(part && is_part(whole, *part, info, block));
    if (!values) continue;
    const auto floats = read_floats(spec, source, id, expert, block);
    promise(floats.has_value());
    const int64_t cols = block.col_end - block.col_begin;
    for (int64_t row = block.row_begin; row < block.row_end && cols > 0; ++row) {
      promise(std::memcmp(&(*values)[static_cast<size_t>(row * info.cols + block.col_begin)],
                          &(*floats)[static_cast<size_t>((row - block.row_begin) * cols)],
                          static_cast<size_t>(cols) * sizeof(float)) == 0);
    }
  }
}

inline void walk_matrix(const MoeSpec& spec, const WeightSource& source, WeightId id,
                        int64_t expert, DecodedWeights& decoded) {
  const WeightInfo info = source.describe(id);
  const WeightBlock all{0, info.rows, 0, info.cols};
  promise(!source.locate(id, expert).empty());
  const auto whole = read_weight(source, id, expert, all);
  const bool is_matrix = id.mlp().has_value() && id.plane() == WeightPlane::kWeights;
  std::optional<std::vector<float>> values;
  if (whole && is_matrix) values = read_floats(spec, source, id, expert, all);
  // Experts differ in where they lie.
  if (whole && expert == 0) check_slices(spec, source, id, expert, *whole, values);
  decoded.push_back(whole.value_or(std::vector<std::byte>()));
  if (!values) return;
  const auto bytes = std::as_bytes(std::span(*values));
  decoded.emplace_back(bytes.begin(), bytes.end());
}

inline DecodedWeights walk_weights(const MoeSpec& spec, const WeightSource& source) {
  DecodedWeights decoded;
  for (const WeightId id : weights::kAll) {
    const int64_t count = source.describe(id).count;
    for (int64_t expert = 0; expert < count; ++expert) {
      walk_matrix(spec, source, id, expert, decoded);
    }
  }
  return decoded;
}

}  // namespace conclave::testing
