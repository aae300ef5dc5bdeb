// Says what FactorPlanes hold for a problem: layers fill them and kernels read them.
#pragma once

#include "core/checked.h"
#include "experts/cuda/lane_codes.h"
#include "experts/problem.h"

#include "conclave/error.h"

#include <cstdint>

namespace conclave::inline v0::experts {

// How w follows from a code's value.
enum class FactorForm : uint8_t {
  kScales,   // value scale
  kZeros,    // (value - zero) scale, where bf16 holds the differences
  kOffsets,  // value scale - offset
  // value scale, of groups of 16 columns, and value scale - offset, of groups of 32, or of 16 of
  // codes of 4 bits, where scales and offsets are whole multiples of a number of their row and
  // groups_of_unit.
  kScaleSteps,
  kSteps,
  // value scale, which bf16 holds for every code: scales are bytes, in the row order of kernels,
  // and a number of each matrix multiplies its sums.
  kExact,
  // As kSteps, of 16 columns beside codes of 2 bits: steps are 0 to 15, and units numbers of f16.
  kSmallSteps,
};
FactorForm factor_form(const ExpertsProblem& problem);
constexpr bool has_offsets(FactorForm form) {
  return form == FactorForm::kOffsets || form == FactorForm::kSteps ||
         form == FactorForm::kSmallSteps;
}
constexpr bool has_steps(FactorForm form) {
  return form == FactorForm::kScaleSteps || form == FactorForm::kSteps ||
         form == FactorForm::kSmallSteps;
}
// Whether codes of 4 bits are multiplied by steps of 16 columns, and sums by units: kernels for
// tensor cores make numbers of bf16 of whole numbers' products.
bool multiplies_steps(const ExpertsProblem& problem);
// Steps lie in words: of the scales of two groups, of a group's scale and offset, or of a scale in
// the lower half of a byte and an offset in the upper one of four groups.
constexpr int32_t bytes_of_step_word(FactorForm form) {
  return form == FactorForm::kSmallSteps ? 4 : 2;
}
constexpr int64_t step_words(FactorForm form, int64_t groups) {
  if (form == FactorForm::kSteps) return groups;
  return ceil_div(groups, form == FactorForm::kSmallSteps ? int64_t{4} : int64_t{2});
}
// Units are a float32 number, or one for scales and one for offsets, or both as f16.
constexpr int32_t bytes_of_step_unit(FactorForm form) { return form == FactorForm::kSteps ? 8 : 4; }
inline constexpr int32_t kMostSmallStep = 15;

// For FactorForm::kExact: whether scales are powers of two; they are floats of a byte if not.
inline bool has_scales_of_powers(const ExpertsProblem& problem) {
  return problem.quant.scale_values == ScaleValues::kPowerOfTwo;
}

// How codes lie on a device.
CodeOrder code_order(const ExpertsProblem& problem);
// The bits that a code takes there.
inline int64_t code_bits(const ExpertsProblem& problem) {
  return code_bits(code_order(problem), bit_size(problem.weight_dtype));
}

// Elements of the weights' type that a row of `count` columns takes on a device, without padding:
// codes of lanes lie in whole blocks, and small ones take half of an element.
inline int64_t stored_columns(const ExpertsProblem& problem, int64_t count) {
  if (code_order(problem) == CodeOrder::kStored) return count;
  return round_up(count, kLaneColumns) * code_bits(problem) / bit_size(problem.weight_dtype);
}

// The place of a row's scales among those of `parts` matrices, of which gate is number 0: kernels
// have eight rows of gate, then those of up.
constexpr int64_t exact_row(int64_t row, int64_t part, int64_t parts) {
  return parts == 1 ? row : row / 8 * 16 + part * 8 + row % 8;
}
constexpr int64_t exact_rows(int64_t rows, int64_t parts) {
  return parts == 1 ? rows : 2 * round_up(rows, 8);
}

// The columns that share factors in planes for a device, as many as divide both a group and a
// kernel's stage, or whole stages; 0: all columns.
int64_t gate_up_factor_columns(const ExpertsProblem& problem);
// Other ranks may hold some columns of the first group.
int64_t down_factor_columns(const ExpertsProblem& problem);

// For kernels that find the scales of blocks by themselves: yes if a slice begins with a block.
Support begins_with_block(const ExpertsProblem& problem);

// Terms of bf16 that a row's values have beside codes for kernels for tensor cores: float32 rows,
// which projections and factors of columns make, are not rounded to one. The terms of a stage's
// columns follow each other.
inline int32_t row_terms(const ExpertsProblem& problem) {
  const bool are_float32 = problem.quant.has_column_factors || problem.has_float_rows;
  return are_float32 && problem.quant.activations == ActivationScale::kNone ? 2 : 1;
}

// Columns of K in a stage: 128 bytes of codes as they are stored.
inline int64_t columns_of_stage(const ExpertsProblem& problem) {
  return 1024 / bit_size(problem.weight_dtype);
}
// For FactorForms that has_steps: each stage of a kernel, and each box of the single launch, has
// units of its own.
inline int64_t groups_of_unit(const ExpertsProblem& problem) {
  return columns_of_stage(problem) / problem.quant.block_cols;
}

}  // namespace conclave::inline v0::experts
