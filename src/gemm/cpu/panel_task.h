// One unit of work of a grouped product: some rows times one packed panel.
#pragma once

#include "gemm/panel_order.h"
#include "gemm/panel_scales.h"
#include "gemm/row_scales.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::gemm {

struct PanelTask;

// Finished sums of some rows of a task, and where their output rows lie.
struct FinishedTile {
  float* sums = nullptr;  // [num_rows, 64]; scratch of the product
  int64_t first_row = 0;
  int64_t num_rows = 0;
  // Output column c of row r lies in the block of 32 columns at
  // out + r * out_row_bytes + c / 32 * out_block_bytes: rows, or groups of interleaved rows.
  std::byte* out = nullptr;
  int64_t out_row_bytes = 0;
  int64_t out_block_bytes = 0;
};

// Makes output rows of finished sums; one out-of-line function per formula and instruction set, so
// that not every pair of formula and weight type needs its own code.
using EpilogueFunction = void (*)(const PanelTask& task, const FinishedTile& tile) noexcept;

// The scales or offsets of a panel's 64 columns, of one group after the other. Where a task has few
// rows they may be as the panel has them (gemm/panel_scales.h), to be widened group by group.
struct GroupNumbers {
  const float* floats = nullptr;  // [groups, 64]; null: none, or those that follow
  const std::byte* packed = nullptr;
  ScaleValues values = ScaleValues::kFloat;
  int log2_unit_groups = 0;
  const std::byte* units = nullptr;  // only steps have them

  [[gnu::always_inline]] bool exist() const { return floats != nullptr || packed != nullptr; }
};
// Tasks of more rows than this, and with an order, have them as floats.
inline constexpr int64_t kMostNarrowRows = 4;

struct PanelTask {
  const std::byte* panel = nullptr;
  // A panel of the same size to fetch meanwhile, because this thread reads it next; or null.
  const std::byte* next_panel = nullptr;
  // Its scales and offsets count: fetching more reads what another thread needs.
  int64_t panel_bytes = 0;
  int64_t k = 0;

  // Row r is at rows + row_index[r] * row_bytes; without an index at rows + r * row_bytes.
  // Rows are zero beyond k, up to the layout's padded_k.
  const std::byte* rows = nullptr;
  const int64_t* row_index = nullptr;
  int64_t row_bytes = 0;
  int64_t num_rows = 0;

  // 64 float32 that are added to the sums, zeros for columns that do not exist; or null.
  const float* bias = nullptr;

  // First output column of this panel in row 0.
  std::byte* out = nullptr;
  int64_t out_row_bytes = 0;
  // Output columns that exist: of 64, or of 32 if gate and up of a column become one.
  int64_t valid_columns = 0;
  // If null, the sums themselves are the output, as float32.
  EpilogueFunction epilogue = nullptr;
  const void* epilogue_parameters = nullptr;
  int64_t out_block_bytes = 0;  // as in FinishedTile

  // Only panels of codes have scales. Those of a group serve `scale_width` consecutive k (the first
  // one `scale_skip` fewer), or, with `order`, all k of one group. Rows may be codes too, unless
  // there is an order; offsets then need sums of their codes.
  GroupNumbers scales = {};
  GroupNumbers offsets = {};  // the same groups have them, if there are any
  int64_t scale_width = 0;
  int64_t scale_skip = 0;
  PanelOrder order = {};
  RowScales row_scales = {};
};

using PanelFunction = void (*)(const PanelTask& task) noexcept;

}  // namespace conclave::inline v0::gemm
