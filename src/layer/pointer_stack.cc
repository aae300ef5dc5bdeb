#include "layer/pointer_stack.h"

#include "core/checked.h"
#include "core/weight_types.h"
#include "quant/planes.h"

#include "conclave/error.h"

namespace conclave::inline v0 {
namespace {

// One number for each matrix, [S], or for gate and up of it, [S, 2].
Stack numbers_of(const Named& named) {
  const int rank = named.tensor.shape.rank() == 2 ? 2 : 1;
  check_tensor(named, rank);
  return {.data = static_cast<const std::byte*>(named.tensor.data),
          .dtype = named.tensor.dtype,
          .count = named.tensor.shape[0],
          .rows = rank == 2 ? named.tensor.shape[1] : 1,
          .cols = 1};
}

}  // namespace

const std::byte* offset_by(const void* data, int64_t elements, DType dtype) {
  return static_cast<const std::byte*>(data) + elements * bit_size(dtype) / 8;
}

void check_tensor(const Named& named, int rank) {
  const auto& [name, tensor] = named;
  if (tensor.data == nullptr) {
    throw Error(ErrorCode::kNullPointer, {.what = "null weights", .tensor = name});
  }
  if (tensor.shape.rank() != rank || tensor.row_stride != 0) {
    throw Error(ErrorCode::kShape, {.what = "weights must be dense",
                                    .tensor = name,
                                    .expected = "rank " + std::to_string(rank) + ", row_stride 0",
                                    .found = tensor.shape.to_string() + ", row_stride " +
                                             std::to_string(tensor.row_stride)});
  }
  const auto address = reinterpret_cast<uintptr_t>(tensor.data);
  if (bit_size(tensor.dtype) == 0) {
    throw Error(ErrorCode::kDType, {.what = "weights of an unknown type",
                                    .tensor = name,
                                    .found = std::to_string(static_cast<int>(tensor.dtype))});
  }
  const auto alignment = static_cast<uintptr_t>(ceil_div(bit_size(tensor.dtype), 8));
  if (address % alignment != 0) {
    throw Error(ErrorCode::kMisaligned, {.what = "weights are not aligned to their element",
                                         .tensor = name,
                                         .expected = "a multiple of " + std::to_string(alignment)});
  }
  // This checks that a row ends with a byte, so that the next begins one.
  if (rank > 0) static_cast<void>(dense_bytes(tensor.dtype, {tensor.shape[rank - 1]}));
  static_cast<void>(dense_bytes(tensor.dtype, tensor.shape));
}

Stack stack_of(const Named& named, int rank, bool may_be_one) {
  const ConstTensorView& tensor = named.tensor;
  const bool one = may_be_one && tensor.shape.rank() == rank - 1;
  check_tensor(named, one ? rank - 1 : rank);
  const int last = tensor.shape.rank() - 1;
  return {.data = static_cast<const std::byte*>(tensor.data),
          .dtype = tensor.dtype,
          .count = one ? 1 : tensor.shape[0],
          .rows = rank == 3 ? tensor.shape[last - 1] : 1,
          .cols = tensor.shape[last]};
}

Stack plane_stack(const Named& named, WeightPlane plane, bool may_be_one) {
  if (quant::is_single(plane)) return numbers_of(named);
  if (!quant::is_by_column(plane)) return stack_of(named, 3, may_be_one);
  return stack_of(named, named.tensor.shape.rank() == 3 ? 3 : 2, false);
}

}  // namespace conclave::inline v0
