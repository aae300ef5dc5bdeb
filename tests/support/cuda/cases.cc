#include "support/cuda/cases.h"

#include <stdexcept>

namespace conclave::testing {

namespace {

const LayerCase kCases[] = {
    {"tiny", 8, 2, 256, 192, "bf16"},
    {"tiny-fp8", 8, 2, 256, 384, "fp8block"},
    {"mixtral-8x7b", 8, 2, 4096, 14336, "bf16"},
    {"qwen3-30b", 128, 8, 2048, 768, "bf16"},
    {"qwen3-235b", 128, 8, 4096, 1536, "bf16"},
    {"olmoe", 64, 8, 2048, 1024, "bf16"},
    {"gpt-oss-20b", 32, 4, 2880, 2880, "bf16", true},
    {"deepseek-v3", 256, 8, 7168, 2048, "bf16"},
    {"dsv3-ep8", 32, 1, 7168, 2048, "bf16", false, true},
    {"qwen3-30b-fp8", 128, 8, 2048, 768, "fp8block"},
    {"qwen3-235b-fp8", 128, 8, 4096, 1536, "fp8block"},
    {"deepseek-v3-fp8", 256, 8, 7168, 2048, "fp8block"},
    {"dsv3-ep8-fp8", 32, 1, 7168, 2048, "fp8block", false, true},
    {"qwen3-30b-f16", 128, 8, 2048, 768, "f16"},
    {"qwen3-30b-channel", 128, 8, 2048, 768, "fp8channel"},
};

}  // namespace

std::span<const LayerCase> layer_cases() { return kCases; }

const LayerCase& find_case(const std::string& name) {
  std::string names;
  for (const LayerCase& c : kCases) {
    if (c.name == name) return c;
    names += " " + c.name;
  }
  throw std::runtime_error("no case " + name + "; there are" + names);
}

CudaProblemOptions problem_options(const LayerCase& c) {
  CudaProblemOptions o{.num_experts = c.experts,
                       .top_k = c.top_k,
                       .hidden_size = c.hidden,
                       .intermediate_size = c.intermediate};
  if (c.format == "f16") o.weight_dtype = DType::kF16;
  if (c.format.starts_with("fp8")) o.weight_dtype = DType::kF8E4M3;
  if (c.format == "fp8block") o.quant = fp8_block_quant();
  if (c.format == "fp8channel") o.quant = fp8_channel_quant();
  if (c.format == "fp8static") o.quant = fp8_static_quant();
  if (c.is_oai) {
    o.has_bias = true;
    o.activation = {.name = "swiglu_oai", .limit = 7, .alpha = 1.702, .beta = 1};
  }
  return o;
}

int32_t routings_per_graph(int64_t num_tokens) {
  return num_tokens <= 64 ? 8 : num_tokens <= 1024 ? 3 : 1;
}

}  // namespace conclave::testing
