#include "dispatch/unpermute_reduce.h"

#include "core/checked.h"
#include "core/row_stride.h"
#include "core/weight_types.h"
#include "cpu/parallel.h"
#include "dispatch/round_row.h"

#include "conclave/error.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

namespace conclave::inline v0::dispatch {
namespace {

// Columns summed at once, in registers over all terms: two cache lines of each row, so that the
// terms' rows are read as parallel streams.
constexpr int64_t kTileColumns = 32;
// Elements read per task, about 20 us; smaller calls do not wake the pool.
constexpr int64_t kElementsPerGrain = 64 * 1024;

// `columns` is a constant for whole tiles, so that the sums stay in registers. `shared` are the
// rows to add if there are no other terms, or null.
inline void sum_terms(const UnpermuteArgs& args, const float* shared, const FinishTile& tile,
                      int64_t columns, float* __restrict result) {
  std::array<float, kTileColumns> sum{};
  for (int64_t term = 0; term < args.terms; ++term) {
    const int64_t at = tile.token * args.terms + term;
    const int64_t row = args.row_of == nullptr ? tile.token : args.row_of[at];
    if (row < 0) continue;
    const float weight = args.weights == nullptr ? 1.0F : args.weights[at];
    const float* __restrict values = args.rows + row * args.row_stride + tile.begin;
    for (int64_t c = 0; c < columns; ++c) sum[static_cast<size_t>(c)] += weight * values[c];
  }
  if (shared != nullptr) {
    const float* __restrict values = shared + tile.token * args.finish.shared_stride + tile.begin;
    for (int64_t c = 0; c < columns; ++c) sum[static_cast<size_t>(c)] += values[c];
  }
  std::copy_n(sum.begin(), columns, result);
}

void store(const TensorView& out, const FinishTile& tile, const float* sum) {
  const int64_t stride = row_stride(out);
  const int64_t at = tile.token * stride + tile.begin;
  switch (out.dtype) {
    case DType::kF32:
      std::copy_n(sum, tile.columns, static_cast<float*>(out.data) + at);
      return;
    case DType::kF16:
      round_to_f16(sum, tile.columns, static_cast<uint16_t*>(out.data) + at);
      return;
    default:
      round_to_bf16(sum, tile.columns, static_cast<uint16_t*>(out.data) + at);
      return;
  }
}

void check_out(const UnpermuteArgs& args) {
  const DType dtype = args.out.dtype;
  if (!is_plain(dtype)) {
    throw Error(ErrorCode::kDType, {.what = "combine cannot round to this type",
                                    .tensor = "out",
                                    .expected = "F32, F16 or BF16",
                                    .found = std::string(to_string(dtype))});
  }
  if (args.out.shape.rank() != 2 || args.out.shape[0] != args.num_tokens) {
    throw Error(ErrorCode::kShape, {.what = "combine needs one output row per token",
                                    .tensor = "out",
                                    .expected = std::to_string(args.num_tokens) + " rows",
                                    .found = args.out.shape.to_string()});
  }
}

}  // namespace

void unpermute_reduce(const UnpermuteArgs& args, Executor& executor) {
  check_out(args);
  const int64_t hidden = args.out.shape[1];
  if (args.num_tokens == 0 || hidden == 0) return;
  const int64_t tiles_per_token = ceil_div(hidden, kTileColumns);
  const bool plain = is_plain(args.finish);
  const float* const shared = plain ? args.finish.shared : nullptr;
  const int64_t elements_per_tile = std::min(hidden, kTileColumns) * (args.terms + 1);
  const int64_t grain = std::max<int64_t>(1, kElementsPerGrain / elements_per_tile);
  cpu::parallel_for(executor, args.num_tokens * tiles_per_token, grain,
                    [&](int64_t begin, int64_t end, int32_t) {
                      std::array<float, kTileColumns> sum;
                      for (int64_t i = begin; i < end; ++i) {
                        const int64_t column = i % tiles_per_token * kTileColumns;
                        const FinishTile tile{i / tiles_per_token, column,
                                              std::min(kTileColumns, hidden - column)};
                        if (tile.columns == kTileColumns) {
                          sum_terms(args, shared, tile, kTileColumns, sum.data());
                        } else {
                          sum_terms(args, shared, tile, tile.columns, sum.data());
                        }
                        if (!plain) finish_sum(args.finish, tile, sum.data());
                        store(args.out, tile, sum.data());
                      }
                    });
}

}  // namespace conclave::inline v0::dispatch
