#include "experts/cuda/factor_planes.h"

#include "quant/weight_format.h"

#include <fmt/format.h>

#include <numeric>
#include <optional>

namespace conclave::inline v0::experts {
namespace {

// Columns of a matrix in groups, of whose first other ranks hold `skipped` columns.
struct GroupedColumns {
  int64_t columns = 0;
  int64_t group = 0;
  int64_t skipped = 0;
};

int64_t gate_up_group(const ExpertsProblem& problem) {
  const int64_t ordered = problem.ordered.gate_up_group;
  return ordered == 0 ? problem.quant.block_cols : ordered;
}
int64_t down_group(const ExpertsProblem& problem) {
  const int64_t ordered = problem.ordered.down_group;
  return ordered == 0 ? problem.quant.block_cols : ordered;
}

int64_t factor_columns(const ExpertsProblem& problem, const GroupedColumns& matrix) {
  if (problem.quant.weights != WeightScale::kBlock) return 0;
  if (matrix.skipped + matrix.columns <= matrix.group) return 0;
  const int64_t shared = std::gcd(matrix.group, matrix.skipped);
  const int64_t stage = columns_of_stage(problem);
  return shared % stage == 0 ? shared : std::gcd(shared, stage);
}

// A sign, two bits of exponent and one of mantissa.
bool is_small_float(const quant::CodeBook& codes) {
  return bit_size(codes.element) == 4 && codes.mantissa_bits == 1 && codes.largest == 6.0F;
}

// Two bits of a value and four of a scale are no more than bf16 has.
bool has_exact_weights(const ExpertsProblem& problem) {
  const QuantSpec& quant = problem.quant;
  const quant::CodeBook* const codes = quant::format_of(problem.weight_dtype).codes;
  if (codes == nullptr || !is_small_float(*codes)) return false;
  if (quant.weights != WeightScale::kBlock || quant.signed_scales) return false;
  // An order of columns puts scales, and codes, elsewhere.
  if (quant.has_column_order) return false;
  int64_t least = 0;  // columns of a scale
  if (quant.scale_values == ScaleValues::kPowerOfTwo) least = 32;
  if (quant.scale_values == ScaleValues::kFloat8) least = 16;
  return least != 0 && gate_up_factor_columns(problem) == least &&
         down_factor_columns(problem) == least;
}

// Columns that share the least scales which are steps.
constexpr int64_t kStepColumnsOfScale = 16;

// Units are those of the columns of a stage, which divide 256, and so are groups.
bool has_steps_of(const ExpertsProblem& problem, int64_t columns) {
  const QuantSpec& quant = problem.quant;
  // The one would have scales that are no steps, the other puts them elsewhere.
  if (quant.has_global_scale || quant.has_column_order) return false;
  return quant.scale_values == ScaleValues::kSteps && quant.block_cols == columns &&
         gate_up_factor_columns(problem) == columns && down_factor_columns(problem) == columns;
}

// Codes of 8 bits as they are stored, or of 4 in their order.
bool fit_steps(const ExpertsProblem& problem) {
  const quant::CodeBook* const codes = quant::format_of(problem.weight_dtype).codes;
  return codes != nullptr && codes->whole.fit &&
         (bit_size(problem.weight_dtype) == 4 ? codes->whole.in_order
                                              : bit_size(problem.weight_dtype) == 8);
}
bool has_scales_in_steps(const ExpertsProblem& problem) {
  return fit_steps(problem) && has_steps_of(problem, kStepColumnsOfScale);
}
// Whether all codes are whole numbers from 0 to 3 for sure.
bool has_small_codes(const ExpertsProblem& problem) {
  const QuantSpec& quant = problem.quant;
  const std::optional<DType>& known = quant.gate_up_codes.dtype;
  return known && known == quant.down_codes.dtype && bit_size(*known) == 2 &&
         bit_size(problem.weight_dtype) == 4;
}
bool has_both_in_steps(const ExpertsProblem& problem) {
  if (!fit_steps(problem) || problem.quant.zero_values != ScaleValues::kSteps) return false;
  return has_steps_of(problem, kWordColumns) ||
         (bit_size(problem.weight_dtype) == 4 && has_steps_of(problem, kStepColumnsOfScale));
}

}  // namespace

FactorForm factor_form(const ExpertsProblem& problem) {
  switch (problem.quant.zeros) {
    case WeightZero::kNone:
      if (has_exact_weights(problem)) return FactorForm::kExact;
      return has_scales_in_steps(problem) ? FactorForm::kScaleSteps : FactorForm::kScales;
    case WeightZero::kOffset:
      if (!has_both_in_steps(problem)) return FactorForm::kOffsets;
      return has_small_codes(problem) && problem.quant.block_cols == kStepColumnsOfScale
                 ? FactorForm::kSmallSteps
                 : FactorForm::kSteps;
    case WeightZero::kPoint:
      break;
  }
  // The difference of other values and a zero point may have more bits than bf16.
  return quant::format_of(problem.weight_dtype).codes->whole.fit ? FactorForm::kZeros
                                                                 : FactorForm::kOffsets;
}

bool multiplies_steps(const ExpertsProblem& problem) {
  return has_steps(factor_form(problem)) && bit_size(problem.weight_dtype) == 4 &&
         problem.quant.block_cols == kStepColumnsOfScale;
}

CodeOrder code_order(const ExpertsProblem& problem) {
  if (factor_form(problem) == FactorForm::kExact) return CodeOrder::kLanesOfFloats;
  if (factor_form(problem) == FactorForm::kSmallSteps) return CodeOrder::kLanesOfSmallNumbers;
  if (multiplies_steps(problem)) return CodeOrder::kLanesOfNumbers;
  const quant::CodeBook* const codes = quant::format_of(problem.weight_dtype).codes;
  if (codes == nullptr || bit_size(problem.weight_dtype) != 4) return CodeOrder::kStored;
  // A word has codes of 32 columns.
  const bool fits = gate_up_factor_columns(problem) % kWordColumns == 0 &&
                    down_factor_columns(problem) % kWordColumns == 0;
  if (!fits) return CodeOrder::kStored;
  if (codes->whole.in_order) return CodeOrder::kLanesOfNumbers;
  if (problem.quant.zeros != WeightZero::kNone) return CodeOrder::kStored;
  // Sums of fewer columns would wait for two products each.
  const bool has_long_sums = gate_up_factor_columns(problem) % kLaneColumns == 0 &&
                             down_factor_columns(problem) % kLaneColumns == 0;
  return codes->bf16_multiplier != 0 || has_long_sums ? CodeOrder::kLanesOfPairs
                                                      : CodeOrder::kStored;
}

int64_t gate_up_factor_columns(const ExpertsProblem& problem) {
  return factor_columns(
      problem, {.columns = problem.input_columns(), .group = gate_up_group(problem), .skipped = 0});
}

int64_t down_factor_columns(const ExpertsProblem& problem) {
  return factor_columns(problem, {.columns = problem.intermediate_size,
                                  .group = down_group(problem),
                                  .skipped = problem.skipped_columns});
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
