#include "layer/cuda/gathered_row.h"

#include "core/checked.h"
#include "core/weight_types.h"
#include "layer/cuda/row_format.h"

namespace conclave::inline v0 {
namespace {

// Rows that become codes, or are multiplied first, travel as they are: what one rank would make of
// them is made where they arrive. Others take the kernels' type before, which one rank gives them.
DType travelling_type(const CudaPlan& plan, DType source) {
  const bool as_kernels_read = is_plain(plan.spec.weight_dtype) && !plan.has_rows_of_slots();
  return as_kernels_read ? plan.routed.row_dtype : source;
}

// Added to the rows of a type: two types of one size, or whose sizes differ by padding alone, must
// not be taken for each other.
int64_t mark_of(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return 0;
    case DType::kF16:
      return kRowAlignmentBytes;
    default:
      return 2 * kRowAlignmentBytes;
  }
}

constexpr auto kChoiceBytes = static_cast<int64_t>(sizeof(int32_t) + sizeof(float));

}  // namespace

GatheredRow gathered_row(const CudaPlan& plan, DType source) {
  GatheredRow row{.dtype = travelling_type(plan, source),
                  .columns = plan.routed.problem.hidden_size};
  row.ids = round_up(row.columns * byte_size(row.dtype), kRowAlignmentBytes);
  row.bytes =
      round_up(row.ids + plan.num_slots() * kChoiceBytes, kRowAlignmentBytes) + mark_of(row.dtype);
  return row;
}

int64_t most_gathered_row_bytes(const CudaPlan& plan) {
  return gathered_row(plan, DType::kF32).bytes;
}

}  // namespace conclave::inline v0
