#include "experts/quantize_rows.h"

#include "core/float_convert.h"
#include "core/row_stride.h"
#include "cpu/parallel.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace conclave::inline v0::experts {
namespace {

// It has no branches, so that the compiler vectorises the loop around it.
uint16_t round_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = bits + 0x7fffU + ((bits >> 16) & 1U);
  const uint32_t quiet = bits | 0x00400000U;
  const bool nan = (bits & 0x7fffffffU) > 0x7f800000U;
  return static_cast<uint16_t>((nan ? quiet : rounded) >> 16);
}

template <class To, class From, class Convert>
void convert_row(const std::byte* source, int64_t count, std::byte* target, Convert convert) {
  const auto* from = static_cast<const From*>(static_cast<const void*>(source));
  auto* to = static_cast<To*>(static_cast<void*>(target));
  for (int64_t i = 0; i < count; ++i) to[i] = convert(from[i]);
}

void row_to_f32(DType from, const std::byte* source, int64_t count, std::byte* target) {
  switch (from) {
    case DType::kF16:
      convert_row<float, uint16_t>(source, count, target, f16_to_float);
      return;
    case DType::kBF16:
      convert_row<float, uint16_t>(source, count, target, bf16_to_float);
      return;
    default:
      std::memcpy(target, source, static_cast<size_t>(count) * sizeof(float));
      return;
  }
}

void row_to_bf16(DType from, const std::byte* source, int64_t count, std::byte* target) {
  switch (from) {
    case DType::kF16:
      convert_row<uint16_t, uint16_t>(
          source, count, target, [](uint16_t bits) { return round_to_bf16(f16_to_float(bits)); });
      return;
    case DType::kBF16:
      std::memcpy(target, source, static_cast<size_t>(count) * sizeof(uint16_t));
      return;
    default:
      convert_row<uint16_t, float>(source, count, target, round_to_bf16);
      return;
  }
}

void convert_block(DType row_dtype, DType from, const std::byte* source, int64_t count,
                   std::byte* target) {
  if (row_dtype == DType::kBF16) {
    row_to_bf16(from, source, count, target);
  } else {
    row_to_f32(from, source, count, target);
  }
}

// Widens and weights one block at a time, so that no row needs scratch memory.
void weigh_row(DType from, const std::byte* source, float weight, int64_t count, DType row_dtype,
               std::byte* target) {
  constexpr int64_t kBlock = 256;
  std::array<float, kBlock> values;
  auto* const bytes = static_cast<std::byte*>(static_cast<void*>(values.data()));
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t columns = std::min(kBlock, count - begin);
    row_to_f32(from, source + begin * byte_size(from), columns, bytes);
    for (int64_t i = 0; i < columns; ++i) values[static_cast<size_t>(i)] *= weight;
    convert_block(row_dtype, DType::kF32, bytes, columns, target + begin * byte_size(row_dtype));
  }
}

// Makes `copies` rows from each row of `hidden`: calls convert(row, source, target) and zeroes the
// rest of the target.
template <class Convert>
RowBundle make_rows(const ConstTensorView& hidden, int64_t copies, DType row_dtype,
                    int64_t row_bytes, std::byte* destination, Executor& executor,
                    const Convert& convert) {
  const int64_t num_rows = hidden.shape[0] * copies;
  const int64_t columns = hidden.shape[1];
  const int64_t stride = row_stride(hidden);
  const int64_t source_row_bytes = stride * byte_size(hidden.dtype);
  const auto* source = static_cast<const std::byte*>(hidden.data);
  const auto used_bytes = static_cast<size_t>(columns * byte_size(row_dtype));
  const size_t padding = static_cast<size_t>(row_bytes) - used_bytes;
  cpu::parallel_for(executor, num_rows, 16, [&](int64_t begin, int64_t end, int32_t) {
    for (int64_t row = begin; row < end; ++row) {
      std::byte* target = destination + row * row_bytes;
      convert(row, source + row / copies * source_row_bytes, target);
      std::memset(target + used_bytes, 0, padding);
    }
  });
  return {.rows = destination, .num_rows = num_rows, .row_bytes = row_bytes, .dtype = row_dtype};
}

}  // namespace

RowBundle quantize_rows(const ConstTensorView& hidden, DType row_dtype, int64_t row_bytes,
                        std::byte* destination, Executor& executor) {
  return make_rows(hidden, 1, row_dtype, row_bytes, destination, executor,
                   [&](int64_t, const std::byte* source, std::byte* target) {
                     convert_block(row_dtype, hidden.dtype, source, hidden.shape[1], target);
                   });
}

RowBundle quantize_weighted_rows(const ConstTensorView& hidden, const float* weights, int64_t top_k,
                                 DType row_dtype, int64_t row_bytes, std::byte* destination,
                                 Executor& executor) {
  return make_rows(hidden, top_k, row_dtype, row_bytes, destination, executor,
                   [&](int64_t row, const std::byte* source, std::byte* target) {
                     weigh_row(hidden.dtype, source, weights[row], hidden.shape[1], row_dtype,
                               target);
                   });
}

}  // namespace conclave::inline v0::experts
