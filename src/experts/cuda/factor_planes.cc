#include "experts/cuda/factor_planes.h"

#include "quant/weight_format.h"

#include <fmt/format.h>

#include <numeric>

namespace conclave::inline v0::experts {

FactorForm factor_form(const ExpertsProblem& problem) {
  switch (problem.quant.zeros) {
    case WeightZero::kNone:
      return FactorForm::kScales;
    case WeightZero::kOffset:
      return FactorForm::kOffsets;
    case WeightZero::kPoint:
      break;
  }
  // The difference of other values and a zero point may have more bits than bf16.
  return quant::format_of(problem.weight_dtype).codes->whole.fit ? FactorForm::kZeros
                                                                 : FactorForm::kOffsets;
}

int64_t factor_columns(const ExpertsProblem& problem, int64_t columns, int64_t skipped) {
  const QuantSpec& quant = problem.quant;
  if (quant.weights != WeightScale::kBlock || skipped + columns <= quant.block_cols) return 0;
  const int64_t shared = std::gcd(quant.block_cols, skipped);
  const int64_t stage = columns_of_stage(problem);
  return shared % stage == 0 ? shared : std::gcd(shared, stage);
}

Support begins_with_block(const ExpertsProblem& problem) {
  if (problem.skipped_rows == 0 && problem.skipped_columns == 0) return Support::yes();
  return Support::no(
      fmt::format("takes slices that begin with a block of {}x{}; found {} rows and {} columns of "
                  "it on another "
                  "rank",
                  problem.quant.block_rows, problem.quant.block_cols, problem.skipped_rows,
                  problem.skipped_columns));
}

}  // namespace conclave::inline v0::experts
