// Row "cuda.stream_codes_sm90": weights are codes of 4 or 8 bits, which are read from memory once
// and decoded to bf16 in registers, beside bf16 rows.
#pragma once

#include "experts/cuda/device_experts.h"

#include <memory>
#include <span>

namespace conclave::inline v0::experts {

// Hopper; codes of every format, with or without zero points or offsets, whose scales are those of
// whole matrices, of rows, or of groups that a multiple of 16 columns divides; rows as they are, or
// as values of codes.
Support stream_codes_supports(const ExpertsProblem& problem);
std::span<const DeviceTile> stream_codes_tiles(const ExpertsProblem& problem);
// The intermediate rows, where they begin in the workspace.
struct StreamCodesWorkspace {
  int64_t stride = 0;  // elements
  size_t rows = 0;     // bf16, behind the counters
  size_t floats = 0;   // before they become values of codes
  size_t factors = 0;  // by row
  size_t bytes = 0;
};
StreamCodesWorkspace stream_codes_workspace(const ExpertsProblem& problem, int64_t rows);
size_t stream_codes_bytes(const ExpertsProblem& problem, int64_t tokens);
std::unique_ptr<DeviceExpertsKernel> make_stream_codes(const ExpertsProblem& problem,
                                                       const DeviceExperts& weights,
                                                       const DeviceTile& tile);

// This tells apart the kernels of a tile.
struct CodeKernelForm {
  int64_t bits = 0;
  // Products of so many columns are added up unscaled: 16, 32, 64 beside `in_pairs`, 128 beside
  // `in_order`.
  int32_t columns_of_sum = 32;
  bool offsets = false;
  bool two_terms = false;  // takes_two_terms
  // CodeOrder::kLanesOfNumbers, which takes no table, and kLanesOfPairs.
  bool in_order = false;
  bool in_pairs = false;
  bool exact = false;  // FactorForm::kExact, where scales of 16 columns are of e4m3
  bool steps = false;  // has_steps(FactorForm)
  friend bool operator==(const CodeKernelForm&, const CodeKernelForm&) = default;
};
CodeKernelForm code_kernel_form(const ExpertsProblem& problem);
// multiplies_steps of the problem.
constexpr bool multiplies_steps(const CodeKernelForm& form) {
  return form.bits <= 4 && form.steps && form.columns_of_sum == 16;
}
// CodeOrder::kLanesOfSmallNumbers.
inline constexpr CodeKernelForm kSmallCodesForm{
    .bits = 2, .columns_of_sum = 16, .offsets = true, .in_order = true, .steps = true};

// Stages that shared memory has room for beside the values of codes, with tiles of 16 to 96 tokens
// and 128 weight rows, or of up to 32 tokens and 256.
constexpr int32_t code_stages(const CodeKernelForm& form, int32_t tokens, int32_t weight_rows) {
  constexpr int32_t kRoom = 217 << 10;
  constexpr int32_t kTable = 32 << 10;
  // A stage of 4 bits has 256 columns in groups, which have a scale, with or without a zero point
  // or an offset, for each row.
  const int32_t groups = 256 / form.columns_of_sum;
  const int32_t codes_and_tokens = weight_rows * 128 + tokens * 512;
  if (form.exact) return kRoom / (codes_and_tokens + weight_rows * groups);
  if (form.steps && !form.offsets) {
    const auto columns = static_cast<int32_t>(1024 / form.bits);
    return kRoom / (weight_rows * (128 + columns / 16 + 4) + tokens * columns * 2);
  }
  // Those that offsets multiply have three numbers of bf16 for each token and group.
  if (form.bits == 2) {
    return kRoom / (weight_rows * (64 + groups + 4) + tokens * (512 + groups * 6));
  }
  if (form.steps) {
    return kRoom / (codes_and_tokens + weight_rows * (groups * 2 + 8) + tokens * groups * 6);
  }
  if (form.in_order) {
    return kRoom / (codes_and_tokens + weight_rows * groups * (form.offsets ? 8 : 6));
  }
  if (form.in_pairs) {
    const int32_t room = kRoom - kTable * (form.two_terms ? 2 : 1);
    return room / (codes_and_tokens + weight_rows * groups * 4);
  }
  if (weight_rows == 256) return form.bits == 4 ? 3 : 4;
  const int32_t at_16_tokens = form.bits == 4 ? 5 : 7;
  const int32_t by_tokens = tokens <= 16 ? 0 : tokens <= 32 ? 1 : tokens <= 64 ? 2 : 3;
  // Factors of 16 columns take as much room as codes of 4 bits.
  const bool has_many_factors = form.columns_of_sum == 16 && (form.offsets || form.bits == 8);
  return at_16_tokens - by_tokens - (has_many_factors ? 1 : 0);
}

}  // namespace conclave::inline v0::experts
