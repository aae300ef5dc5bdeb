#include "core/check_disjoint.h"

#include "core/row_stride.h"

#include "conclave/dtype.h"
#include "conclave/error.h"

#include <cstdint>
#include <string>

namespace conclave::inline v0 {
namespace {

int64_t extent_bytes(const ConstTensorView& tensor) {
  if (tensor.shape.rank() != 2) return tensor.shape.num_elements() * byte_size(tensor.dtype);
  const int64_t rows = tensor.shape[0];
  const int64_t cols = tensor.shape[1];
  if (rows == 0 || cols == 0) return 0;
  return ((rows - 1) * row_stride(tensor) + cols) * byte_size(tensor.dtype);
}

}  // namespace

void check_disjoint(std::string_view output_name, const ConstTensorView& output,
                    std::string_view other_name, const ConstTensorView& other) {
  if (output.empty() || other.empty()) return;
  const auto output_begin = reinterpret_cast<uintptr_t>(output.data);
  const auto other_begin = reinterpret_cast<uintptr_t>(other.data);
  const uintptr_t output_end = output_begin + static_cast<uintptr_t>(extent_bytes(output));
  const uintptr_t other_end = other_begin + static_cast<uintptr_t>(extent_bytes(other));
  if (output_end <= other_begin || other_end <= output_begin) return;
  throw Error(ErrorCode::kOverlap,
              {.what = std::string(output_name) + " overlaps " + std::string(other_name),
               .tensor = std::string(output_name)});
}

}  // namespace conclave::inline v0
