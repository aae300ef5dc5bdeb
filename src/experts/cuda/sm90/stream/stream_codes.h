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
  size_t rows = 0;     // bf16
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
  bool fine = false;  // factors of 16 columns
  bool offsets = false;
  bool two_terms = false;  // bf16 holds no code's value, and two of it do
  // CodeOrder::kLanesOfNumbers, which takes no table.
  bool in_order = false;
  bool long_sums = false;  // with `in_order`: factors are those of 128 columns or more
  bool exact = false;      // FactorForm::kExact; `fine` ones have scales of e4m3
  friend bool operator==(const CodeKernelForm&, const CodeKernelForm&) = default;
};
CodeKernelForm code_kernel_form(const ExpertsProblem& problem);

// Stages that shared memory has room for beside the values of codes, with tiles of 16 to 96 tokens
// and 128 weight rows, or of up to 32 tokens and 256.
constexpr int32_t code_stages(const CodeKernelForm& form, int32_t tokens, int32_t weight_rows) {
  constexpr int32_t kRoom = 217 << 10;
  if (form.exact) {
    return kRoom / (weight_rows * 128 + tokens * 512 + weight_rows * (form.fine ? 16 : 8));
  }
  if (form.in_order) {
    // A stage has 256 columns: two or eight groups with a scale and a zero point, or an offset, for
    // each row.
    const int32_t factor_bytes = weight_rows * (form.offsets ? 8 : 6) * (form.long_sums ? 2 : 8);
    return kRoom / (weight_rows * 128 + tokens * 512 + factor_bytes);
  }
  if (weight_rows == 256) return form.bits == 4 ? 3 : 4;
  const int32_t at_16_tokens = form.bits == 4 ? 5 : 7;
  const int32_t by_tokens = tokens <= 16 ? 0 : tokens <= 32 ? 1 : tokens <= 64 ? 2 : 3;
  // Factors of 16 columns take as much room as codes of 4 bits.
  const bool has_many_factors = form.fine && (form.offsets || form.bits == 8);
  return at_16_tokens - by_tokens - (has_many_factors ? 1 : 0);
}

}  // namespace conclave::inline v0::experts
