#include "core/checked.h"
#include "core/row_stride.h"

#include "conclave/error.h"
#include "conclave/permute.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>

namespace conclave::inline v0 {
namespace {

void check_matrix(std::string_view name, const ConstTensorView& tensor,
                  std::initializer_list<DType> dtypes) {
  if (tensor.shape.rank() != 2 || row_stride(tensor) < tensor.shape[1]) {
    throw Error(ErrorCode::kShape, {.what = "an argument is no matrix",
                                    .tensor = std::string(name),
                                    .expected = "rank 2, rows apart from each other",
                                    .found = tensor.shape.to_string()});
  }
  if (std::find(dtypes.begin(), dtypes.end(), tensor.dtype) == dtypes.end()) {
    throw Error(ErrorCode::kDType, {.what = "an argument has the wrong type",
                                    .tensor = std::string(name),
                                    .found = std::string(to_string(tensor.dtype))});
  }
  if (tensor.data == nullptr && tensor.shape[0] > 0 && tensor.shape[1] > 0) {
    throw Error(ErrorCode::kNullPointer,
                {.what = "an argument has no data", .tensor = std::string(name)});
  }
}

void check_rows(std::string_view name, int64_t found, int64_t expected) {
  if (found == expected) return;
  throw Error(ErrorCode::kShape, {.what = "an argument has the wrong number of rows",
                                  .tensor = std::string(name),
                                  .expected = std::to_string(expected),
                                  .found = std::to_string(found)});
}

int64_t count_local(const ExpertSelection& experts) {
  if (experts.num_experts < 1) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "ExpertSelection.num_experts is out of range",
                                              .expected = "at least 1",
                                              .found = std::to_string(experts.num_experts)});
  }
  if (experts.local_of.empty()) return experts.num_experts;
  if (static_cast<int64_t>(experts.local_of.size()) != experts.num_experts) {
    throw Error(ErrorCode::kShape, {.what = "the expert map has another length than the experts",
                                    .tensor = "local_of",
                                    .expected = std::to_string(experts.num_experts),
                                    .found = std::to_string(experts.local_of.size())});
  }
  int64_t local = 0;
  for (const int32_t index : experts.local_of) {
    if (index >= experts.num_experts || index < -1) {
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = "an entry of the expert map is out of range",
                   .tensor = "local_of",
                   .found = std::to_string(index),
                   .limit = "-1 to " + std::to_string(experts.num_experts - 1)});
    }
    local = std::max<int64_t>(local, index + 1);
  }
  return local;
}

// The local expert of every slot, -1 for none.
std::vector<int32_t> local_experts(const ConstTensorView& topk_ids,
                                   const ExpertSelection& experts) {
  const int64_t tokens = topk_ids.shape[0];
  const int64_t top_k = topk_ids.shape[1];
  std::vector<int32_t> local(static_cast<size_t>(tokens * top_k), -1);
  for (int64_t slot = 0; slot < tokens * top_k; ++slot) {
    const int64_t at = slot / top_k * row_stride(topk_ids) + slot % top_k;
    const int64_t id = topk_ids.dtype == DType::kI64
                           ? static_cast<const int64_t*>(topk_ids.data)[at]
                           : static_cast<const int32_t*>(topk_ids.data)[at];
    if (id < 0 || id >= experts.num_experts) continue;
    local[static_cast<size_t>(slot)] = experts.local_of.empty()
                                           ? static_cast<int32_t>(id)
                                           : experts.local_of[static_cast<size_t>(id)];
  }
  return local;
}

std::vector<int64_t> count_slots(std::span<const int32_t> local, int64_t num_local) {
  std::vector<int64_t> counts(static_cast<size_t>(num_local));
  for (const int32_t expert : local) {
    if (expert >= 0) ++counts[static_cast<size_t>(expert)];
  }
  return counts;
}

const std::byte* row_address(const ConstTensorView& tensor, int64_t row) {
  return static_cast<const std::byte*>(tensor.data) +
         row * row_stride(tensor) * byte_size(tensor.dtype);
}

}  // namespace

BlockAlignment align_block_size(const ConstTensorView& topk_ids, int64_t block_size,
                                const ExpertSelection& experts) {
  check_matrix("topk_ids", topk_ids, {DType::kI32, DType::kI64});
  const int64_t num_local = count_local(experts);
  const auto bound = checked_mul(num_local, block_size);
  const int64_t slots = topk_ids.shape.num_elements();
  if (block_size < 1 || !bound || *bound > std::numeric_limits<int32_t>::max() - slots) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "block_size is out of range",
                 .found = std::to_string(block_size),
                 .limit = "1 and more, slots and padding within 31 bits"});
  }
  const std::vector<int32_t> local = local_experts(topk_ids, experts);
  std::vector<int64_t> next = count_slots(local, num_local);
  BlockAlignment result;
  for (int64_t expert = 0; expert < num_local; ++expert) {
    int64_t& at = next[static_cast<size_t>(expert)];
    const int64_t blocks = ceil_div(at, block_size);
    result.expert_of_block.insert(result.expert_of_block.end(), static_cast<size_t>(blocks),
                                  static_cast<int32_t>(expert));
    at = result.num_padded;
    result.num_padded += blocks * block_size;
  }
  result.slots.assign(static_cast<size_t>(result.num_padded), static_cast<int32_t>(slots));
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int32_t expert = local[static_cast<size_t>(slot)];
    if (expert < 0) continue;
    result.slots[static_cast<size_t>(next[static_cast<size_t>(expert)]++)] =
        static_cast<int32_t>(slot);
  }
  return result;
}

PermutedRows permute_rows(const ConstTensorView& hidden, const ConstTensorView& topk_ids,
                          const ExpertSelection& experts) {
  check_matrix("hidden", hidden, {DType::kF32, DType::kF16, DType::kBF16});
  check_matrix("topk_ids", topk_ids, {DType::kI32, DType::kI64});
  check_rows("topk_ids", topk_ids.shape[0], hidden.shape[0]);
  const int64_t num_local = count_local(experts);
  const int64_t width = hidden.shape[1];
  const int64_t top_k = topk_ids.shape[1];
  const std::vector<int32_t> local = local_experts(topk_ids, experts);
  std::vector<int64_t> next = count_slots(local, num_local);

  PermutedRows result;
  result.expert_first_row.push_back(0);
  for (int64_t& at : next) {
    const int64_t begin = result.expert_first_row.back();
    result.expert_first_row.push_back(begin + at);
    at = begin;
  }
  const int64_t rows = result.expert_first_row.back();
  result.rows = Tensor(hidden.dtype, {rows, width});
  result.slot_of_row.resize(static_cast<size_t>(rows));
  result.row_of_slot.assign(local.size(), -1);
  const auto row_bytes = static_cast<size_t>(width * byte_size(hidden.dtype));
  for (size_t slot = 0; slot < local.size(); ++slot) {
    if (local[slot] < 0) continue;
    const int64_t row = next[static_cast<size_t>(local[slot])]++;
    const int64_t token = static_cast<int64_t>(slot) / top_k;
    result.row_of_slot[slot] = row;
    result.slot_of_row[static_cast<size_t>(row)] = static_cast<int64_t>(slot);
    if (row_bytes == 0) continue;
    std::memcpy(result.rows.as<std::byte>() + static_cast<size_t>(row) * row_bytes,
                row_address(hidden, token), row_bytes);
  }
  return result;
}

void unpermute_rows(const ConstTensorView& rows, std::span<const int64_t> row_of_slot,
                    const ConstTensorView& topk_weights, const TensorView& out) {
  const auto floats = {DType::kF32, DType::kF16, DType::kBF16};
  check_matrix("rows", rows, floats);
  check_matrix("topk_weights", topk_weights, {DType::kF32});
  check_matrix("out", out, floats);
  const int64_t top_k = topk_weights.shape[1];
  check_rows("topk_weights", topk_weights.shape[0], out.shape[0]);
  check_rows("row_of_slot", static_cast<int64_t>(row_of_slot.size()), out.shape[0] * top_k);
  if (rows.shape[1] != out.shape[1]) {
    throw Error(ErrorCode::kShape, {.what = "rows and out differ in width",
                                    .tensor = "out",
                                    .expected = std::to_string(rows.shape[1]),
                                    .found = std::to_string(out.shape[1])});
  }
  for (const int64_t row : row_of_slot) {
    if (row >= -1 && row < rows.shape[0]) continue;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a slot names a row that does not exist",
                 .tensor = "row_of_slot",
                 .found = std::to_string(row),
                 .limit = "-1 to " + std::to_string(rows.shape[0] - 1)});
  }
  const Shape row_shape{out.shape[1]};
  std::vector<float> values(static_cast<size_t>(out.shape[1]));
  std::vector<float> sum(values.size());
  for (int64_t token = 0; token < out.shape[0]; ++token) {
    std::fill(sum.begin(), sum.end(), 0.0F);
    for (int64_t j = 0; j < top_k; ++j) {
      const int64_t row = row_of_slot[static_cast<size_t>(token * top_k + j)];
      if (row < 0) continue;
      convert({.data = row_address(rows, row), .dtype = rows.dtype, .shape = row_shape},
              {.data = values.data(), .dtype = DType::kF32, .shape = row_shape});
      const float weight =
          static_cast<const float*>(topk_weights.data)[token * row_stride(topk_weights) + j];
      for (size_t c = 0; c < sum.size(); ++c) sum[c] += weight * values[c];
    }
    const int64_t stride = row_stride(out);
    convert({.data = sum.data(), .dtype = DType::kF32, .shape = row_shape},
            {.data = static_cast<std::byte*>(out.data) + token * stride * byte_size(out.dtype),
             .dtype = out.dtype,
             .shape = row_shape});
  }
}

}  // namespace conclave::inline v0
