#include "layer/cuda/gathered_row.h"

#include "core/checked.h"
#include "core/weight_types.h"
#include "layer/cuda/row_format.h"
#include "quant/gpu_rows.h"
#include "quant/weight_format.h"

namespace conclave::inline v0 {
namespace {

// Rows that are multiplied first, by adapters too, or become codes of which travels_as_codes says
// no, travel as they are: what one rank would make of them is made where they arrive. Others take
// the kernels' type before, which one rank gives them.
DType travelling_type(const CudaPlan& plan, DType source) {
  if (travels_as_codes(plan)) {
    return quant::format_of(plan.spec.weight_dtype).row_codes->element;
  }
  const bool as_kernels_read =
      is_plain(plan.spec.weight_dtype) && !plan.has_rows_of_slots() && !plan.takes_adapters();
  return as_kernels_read ? plan.routed.row_dtype : source;
}

// Added to the rows of a type: two types of one size, or whose sizes differ by padding alone, must
// not be taken for each other.
int64_t padding_of(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return kRowAlignmentBytes;
    case DType::kF32:
      return 2 * kRowAlignmentBytes;
    default:
      return 0;  // codes too: all ranks have them, or none
  }
}

int64_t scale_bytes(const CudaPlan& plan) {
  if (!travels_as_codes(plan)) return 0;
  const experts::ExpertsProblem& problem = plan.routed.problem;
  const bool grouped = problem.quant.activations == ActivationScale::kGroup;
  const int64_t scales = grouped ? ceil_div(problem.hidden_size, kScaleColumns) : 1;
  return scales * static_cast<int64_t>(sizeof(float));
}

constexpr auto kChoiceBytes = static_cast<int64_t>(sizeof(int32_t) + sizeof(float));

}  // namespace

bool travels_as_codes(const CudaPlan& plan) {
  const experts::ExpertsProblem& problem = plan.routed.problem;
  const QuantSpec& quant = problem.quant;
  const bool of_the_row =
      quant.activations == ActivationScale::kGroup || quant.activations == ActivationScale::kToken;
  return plan.routed.quantises() && of_the_row && !plan.has_rows_of_slots() &&
         !plan.takes_adapters() && bit_size(problem.weight_dtype) == 8 &&
         quant::code_rows_support(problem.weight_dtype, quant);
}

GatheredRow gathered_row(const CudaPlan& plan, DType source) {
  GatheredRow row{.dtype = travelling_type(plan, source),
                  .columns = plan.routed.problem.hidden_size};
  row.scales = round_up(row.columns * byte_size(row.dtype), kRowAlignmentBytes);
  row.ids = row.scales + scale_bytes(plan);
  int64_t end = row.ids + plan.num_slots() * kChoiceBytes;
  if (plan.takes_adapters()) {
    row.mark = end;
    end += static_cast<int64_t>(sizeof(int32_t));
  }
  row.bytes = round_up(end, kRowAlignmentBytes) + padding_of(row.dtype);
  return row;
}

int64_t most_gathered_row_bytes(const CudaPlan& plan) {
  return gathered_row(plan, DType::kF32).bytes;
}

}  // namespace conclave::inline v0
