// Sizes of published models on which kernels and layers are timed.
#pragma once

#include "support/cuda/cuda_problem.h"

#include <cstdint>
#include <span>
#include <string>

namespace conclave::testing {

struct LayerCase {
  std::string name;  // "qwen3-30b-fp8"
  int64_t experts = 0;
  int64_t top_k = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  std::string format;     // "bf16", "f16", "fp8block", "fp8channel", "fp8static"
  bool is_oai = false;    // biases and swiglu_oai, as in gpt-oss
  bool is_shard = false;  // one of several ranks: T counts received rows
};

// "tiny" and "tiny-fp8" come first; they are for tests of the programs themselves.
std::span<const LayerCase> layer_cases();
// Throws std::runtime_error listing the names.
const LayerCase& find_case(const std::string& name);
CudaProblemOptions problem_options(const LayerCase& c);
// The number of differently routed forwards per graph, so that few tokens read other weights each
// time.
int32_t routings_per_graph(int64_t num_tokens);

}  // namespace conclave::testing
