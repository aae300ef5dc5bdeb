// Row "cuda.stream_codes_sm90": weights are codes of 4 or 8 bits, which are read from memory once
// and decoded to bf16 in registers, beside bf16 rows.
#pragma once

#include "experts/cuda/device_experts.h"

#include <memory>
#include <span>

namespace conclave::inline v0::experts {

// Hopper; codes of every format, with or without zero points, whose scales are those of whole
// matrices, of rows, or of groups that cut a kernel's stage evenly; rows that are not quantised.
Support stream_codes_supports(const ExpertsProblem& problem);
std::span<const DeviceTile> stream_codes_tiles(const ExpertsProblem& problem);
size_t stream_codes_bytes(const ExpertsProblem& problem, int64_t tokens);
std::unique_ptr<DeviceExpertsKernel> make_stream_codes(const ExpertsProblem& problem,
                                                       const DeviceExperts& weights,
                                                       const DeviceTile& tile);

// Columns of K in a stage: 128 bytes of codes.
inline int64_t columns_of_stage(const ExpertsProblem& problem) {
  return 1024 / bit_size(problem.weight_dtype);
}
// Columns of K that share a scale; 0: all.
inline int64_t columns_of_group(const ExpertsProblem& problem) {
  return problem.quant.weights == WeightScale::kBlock ? problem.quant.block_cols : 0;
}

}  // namespace conclave::inline v0::experts
