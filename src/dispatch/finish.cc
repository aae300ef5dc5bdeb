#include "dispatch/finish.h"

#include "core/float_convert.h"
#include "core/row_stride.h"

#include <algorithm>

namespace conclave::inline v0::dispatch {
namespace {

template <class T, class Widen>
void add_row(const void* data, int64_t at, float weight, int64_t columns, Widen widen, float* sum) {
  const T* values = static_cast<const T*>(data) + at;
  for (int64_t c = 0; c < columns; ++c) sum[c] += weight * widen(values[c]);
}

void add_identity(const FinishArgs& finish, const FinishTile& tile, float* sum) {
  const float weight = finish.identity_weights[tile.token];
  if (weight == 0.0F) return;
  const ConstTensorView& rows = finish.identity;
  const int64_t stride = row_stride(rows);
  const int64_t at = tile.token * stride + tile.begin;
  switch (rows.dtype) {
    case DType::kF32:
      add_row<float>(
          rows.data, at, weight, tile.columns, [](float value) { return value; }, sum);
      return;
    case DType::kF16:
      add_row<uint16_t>(rows.data, at, weight, tile.columns, f16_to_float, sum);
      return;
    default:
      add_row<uint16_t>(rows.data, at, weight, tile.columns, bf16_to_float, sum);
      return;
  }
}

void add(const float* values, int64_t columns, float* sum) {
  for (int64_t c = 0; c < columns; ++c) sum[c] += values[c];
}

void multiply(float factor, int64_t columns, float* sum) {
  for (int64_t c = 0; c < columns; ++c) sum[c] *= factor;
}

}  // namespace

void finish_sum(const FinishArgs& finish, const FinishTile& tile, float* sum) noexcept {
  if (finish.active != nullptr && finish.active[tile.token] == 0) {
    std::fill_n(sum, tile.columns, 0.0F);
    return;
  }
  if (finish.scale != 1.0F) multiply(finish.scale, tile.columns, sum);
  if (finish.identity_weights != nullptr) add_identity(finish, tile, sum);
  if (finish.bias != nullptr) add(finish.bias + tile.begin, tile.columns, sum);
  if (finish.mix != nullptr) multiply(finish.mix[tile.token], tile.columns, sum);
  if (finish.shared != nullptr) {
    add(finish.shared + tile.token * finish.shared_stride + tile.begin, tile.columns, sum);
  }
  if (finish.residual != nullptr) {
    add(finish.residual + tile.token * finish.residual_stride + tile.begin, tile.columns, sum);
  }
}

}  // namespace conclave::inline v0::dispatch
