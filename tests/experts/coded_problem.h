// Panels of random codes, and what the reference makes of them.
#pragma once

#include "core/code_bits.h"
#include "core/weight_types.h"
#include "gemm/cpu/panel_task.h"
#include "gemm/packed_layout.h"
#include "gemm/reference_product.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace conclave::testing {

// Rows of `k` values, then of scales.
struct Rows {
  std::vector<float> floats = {};
  int64_t count = 0;
  int64_t stride = 0;       // floats
  int64_t scale_width = 0;  // 0: plain
  int64_t exact_k = std::numeric_limits<int64_t>::max();

  const std::byte* bytes() const {
    return static_cast<const std::byte*>(static_cast<const void*>(floats.data()));
  }
};

// Rows as a product finds them.
struct PlacedRows {
  const std::byte* rows = nullptr;
  const int64_t* index = nullptr;
  int64_t row_bytes = 0;
  int64_t count = 0;
  gemm::RowScales scales = {};
};

inline uint32_t bits_of(float value) {
  return std::isnan(value) ? 0x7fc00000U : std::bit_cast<uint32_t>(value);
}

// A panel of random codes; scales and offsets that are no powers of two.
struct Problem {
  Problem(const gemm::PanelLayout& of, uint32_t seed)
      : layout(of), panel(layout.panel_bytes() / sizeof(float)), random(seed) {
    for (int64_t i = 0; i < code_bytes(); ++i) {
      bytes()[i] = static_cast<std::byte>(random() & 0xff);
    }
    const size_t first = layout.weight_bytes() / sizeof(float);
    for (size_t i = first; i < panel.size(); ++i) panel[i] = uniform();
    for (float& value : bias) value = uniform();
    for (std::vector<int32_t>& table : tables) {
      for (int64_t k = 0; k < layout.k && layout.ordered_groups != 0; ++k) {
        table.push_back(
            static_cast<int32_t>(random() % static_cast<uint32_t>(layout.ordered_groups)));
      }
    }
  }
  Problem(DType type, int64_t k, int64_t scale_width, uint32_t seed, int64_t scale_skip = 0)
      : Problem({.dtype = type, .k = k, .scale_width = scale_width, .scale_skip = scale_skip},
                seed) {}
  // Gives each k and column the code that code_of(k, column) has in its low bits.
  template <class Code>
  void set_all_codes(const Code& code_of) {
    const int64_t bits = bit_size(layout.dtype);
    const auto row_bytes = static_cast<size_t>(packed_bytes(layout.dtype, layout.k));
    std::vector<std::byte> rows(row_bytes * size_t{gemm::kPanelColumns});
    gemm::PanelColumns columns{};
    for (int64_t column = 0; column < gemm::kPanelColumns; ++column) {
      std::byte* const row = rows.data() + static_cast<size_t>(column) * row_bytes;
      columns[static_cast<size_t>(column)] = row;
      for (int64_t k = 0; k < layout.k; ++k) {
        set_code(row, k, bits, static_cast<uint8_t>(code_of(k, column) & ((1 << bits) - 1)));
      }
    }
    std::vector<std::byte> packed(layout.panel_bytes());
    gemm::pack_panel(layout, columns, packed.data());
    std::copy_n(packed.begin(), code_bytes(), bytes());
  }
  int64_t code_bytes() const { return static_cast<int64_t>(layout.weight_bytes()); }
  std::byte* bytes() { return static_cast<std::byte*>(static_cast<void*>(panel.data())); }
  gemm::PanelOrder order() const {
    if (layout.ordered_groups == 0) return {};
    return {.lower = tables[0].data(), .upper = tables[1].data()};
  }
  float uniform() { return 0.001F + static_cast<float>(random() & 0xffff) / 65536.0F; }

  gemm::RowScales scales_of(const Rows& rows, int64_t row) const {
    if (rows.scale_width == 0) return {};
    const int64_t skipped = (row * rows.stride + layout.k) * int64_t{sizeof(float)};
    return {.first = rows.bytes() + skipped, .width = rows.scale_width, .exact_k = rows.exact_k};
  }

  // Bits of the biased products of `columns` columns, NaN as one value.
  std::vector<uint32_t> run(gemm::PanelFunction product, const Rows& rows, int64_t columns) {
    const PlacedRows placed{.rows = rows.bytes(),
                            .row_bytes = rows.stride * int64_t{sizeof(float)},
                            .count = rows.count,
                            .scales = scales_of(rows, 0)};
    return run(product, placed, columns);
  }
  std::vector<uint32_t> run(gemm::PanelFunction product, const PlacedRows& rows, int64_t columns) {
    std::vector<float> out(static_cast<size_t>(rows.count * columns));
    product({.panel = bytes(),
             .next_panel = bytes(),
             .k = layout.k,
             .rows = rows.rows,
             .row_index = rows.index,
             .row_bytes = rows.row_bytes,
             .num_rows = rows.count,
             .bias = bias.data(),
             .out = static_cast<std::byte*>(static_cast<void*>(out.data())),
             .out_row_bytes = columns * int64_t{sizeof(float)},
             .valid_columns = columns,
             .scales = {.floats = layout.scales(bytes())},
             .offsets = {.floats = layout.offsets(bytes())},
             .scale_width = layout.scale_width,
             .scale_skip = layout.scale_skip,
             .order = order(),
             .row_scales = rows.scales});
    std::vector<uint32_t> bits;
    for (const float value : out) bits.push_back(bits_of(value));
    return bits;
  }

  std::vector<uint32_t> reference(const Rows& rows, int64_t columns) {
    std::vector<uint32_t> bits;
    for (int64_t r = 0; r < rows.count; ++r) {
      float sums[gemm::kPanelColumns];
      gemm::reference_coded_product(layout, bytes(), rows.floats.data() + r * rows.stride,
                                    scales_of(rows, r), order(), sums);
      for (int64_t c = 0; c < columns; ++c) {
        bits.push_back(bits_of(sums[c] + bias[static_cast<size_t>(c)]));
      }
    }
    return bits;
  }

  gemm::PanelLayout layout;
  std::vector<float> panel;
  std::vector<float> bias = std::vector<float>(static_cast<size_t>(gemm::kPanelColumns));
  std::vector<int32_t> tables[2];  // for the lower and the upper columns
  std::mt19937 random;
};

}  // namespace conclave::testing
