#include "checkpoint/feed_contents.h"

#include "checkpoint/name_list.h"
#include "core/weight_types.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <cstring>

namespace conclave::inline v0::checkpoint {
namespace {

bool is_dense(const ConstTensorView& tensor) {
  return tensor.row_stride == 0 ||
         (tensor.shape.rank() > 0 && tensor.row_stride == tensor.shape[tensor.shape.rank() - 1]);
}

}  // namespace

void check_fed_tensor(const std::string& name, const ConstTensorView& tensor, FeedMemory memory) {
  if (tensor.data == nullptr && tensor.shape.num_elements() > 0) {
    throw Error(ErrorCode::kNullPointer, {.what = "a tensor without data", .tensor = name});
  }
  if (tensor.row_stride * bit_size(tensor.dtype) % 8 != 0) {
    throw Error(ErrorCode::kStride, {.what = "rows begin inside a byte",
                                     .tensor = name,
                                     .found = fmt::format("row_stride {}", tensor.row_stride)});
  }
  if (is_dense(tensor) || (memory == FeedMemory::kCopy && tensor.shape.rank() == 2)) return;
  throw Error(ErrorCode::kStride, {.what = "only dense tensors can be kept in place",
                                   .tensor = name,
                                   .expected = "row_stride 0",
                                   .found = fmt::format("row_stride {}", tensor.row_stride)});
}

std::vector<std::byte> copy_dense(const ConstTensorView& tensor, size_t bytes) {
  std::vector<std::byte> copy(bytes);
  const auto* data = static_cast<const std::byte*>(tensor.data);
  if (bytes == 0) return copy;
  if (is_dense(tensor)) {
    std::memcpy(copy.data(), data, bytes);
    return copy;
  }
  const auto rows = static_cast<size_t>(tensor.shape[0]);
  const size_t row_bytes = bytes / rows;
  const auto stride_bytes = static_cast<size_t>(packed_bytes(tensor.dtype, tensor.row_stride));
  for (size_t row = 0; row < rows; ++row) {
    std::memcpy(copy.data() + row * row_bytes, data + row * stride_bytes, row_bytes);
  }
  return copy;
}

void reject_layer(std::span<const int64_t> layers, int64_t index) {
  throw Error(ErrorCode::kLayerNotFound,
              {.what = fmt::format("the model has no MoE layer {}", index),
               .expected = "one of the MoE layers " + render_ranges(layers),
               .found = std::to_string(index)});
}

}  // namespace conclave::inline v0::checkpoint
