#include "layer/cuda/own_row_form.h"

#include "core/checked.h"
#include "experts/cuda/factor_planes.h"
#include "layer/cuda/row_format.h"

namespace conclave::inline v0 {

OwnRowForm own_row_form(const CudaMlpPlan& part) {
  const experts::ExpertsProblem& problem = part.problem;
  const int64_t width = padded_row(problem.input_columns(), DType::kBF16);
  if (part.quantises() || part.runs_by_reference()) return {.dtype = DType::kF32, .width = width};
  if (experts::row_terms(problem) == 1) return {.width = width};
  const int64_t stage = experts::columns_of_stage(problem);
  return {.width = 2 * round_up(width, stage), .term_columns = stage};
}

}  // namespace conclave::inline v0
