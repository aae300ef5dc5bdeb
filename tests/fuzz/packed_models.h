// The models that the harness of packed weights begins with: families, and ways in which they lie.
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace conclave::testing {

inline constexpr int64_t kExperts = 2;

struct Sizes {
  int64_t hidden = 0;
  int64_t width = 0;
};
// Small, since an input is worth as much as the number of others that follow it.
inline constexpr std::array kSizes = {Sizes{32, 32},  Sizes{64, 32},  Sizes{32, 64},
                                      Sizes{16, 48},  Sizes{33, 17},  Sizes{128, 32},
                                      Sizes{32, 128}, Sizes{128, 128}};

// A matrix, or a stack of one for each expert, by its name in the model.
struct Matrix {
  std::string name;
  int64_t rows = 0;
  int64_t cols = 0;
  bool is_stack = false;
  bool is_module = true;  // which the method may have packed
};

// A family's configuration and its matrices in one of the ways in which they are stored.
struct Family {
  std::string keys;
  std::string experts = {};  // expert_dtype
  std::vector<Matrix> matrices = {};
};

inline void add_each(const std::string& prefix, std::array<const char*, 3> names,
                     const Sizes& sizes, Family& family) {
  for (int64_t expert = 0; expert < kExperts; ++expert) {
    for (size_t i = 0; i < 3; ++i) {
      const bool is_down = i == 2;
      family.matrices.push_back({.name = fmt::format("{}.{}.{}.weight", prefix, expert, names[i]),
                                 .rows = is_down ? sizes.hidden : sizes.width,
                                 .cols = is_down ? sizes.width : sizes.hidden});
    }
  }
}

inline std::string qwen_keys(const Sizes& sizes, const char* type) {
  return fmt::format(
      R"("model_type":"{}","hidden_size":{},"moe_intermediate_size":{},"num_experts":{},)"
      R"("num_experts_per_tok":1,"num_hidden_layers":1,"norm_topk_prob":true,"hidden_act":"silu",)"
      R"("dtype":"bfloat16")",
      type, sizes.hidden, sizes.width, kExperts);
}

inline const std::string kMlp = "model.layers.0.mlp.";

inline void add_router(const Sizes& sizes, Family& family) {
  family.matrices.push_back({kMlp + "gate.weight", kExperts, sizes.hidden});
}

inline Family qwen_of_experts(const Sizes& sizes) {
  Family family{.keys = qwen_keys(sizes, "qwen3_moe")};
  add_each(kMlp + "experts", {"gate_proj", "up_proj", "down_proj"}, sizes, family);
  add_router(sizes, family);
  return family;
}

inline Family qwen_of_mlx(const Sizes& sizes) {
  Family family{.keys = qwen_keys(sizes, "qwen3_moe")};
  const std::string prefix = kMlp + "switch_mlp.";
  family.matrices = {{prefix + "gate_proj.weight", sizes.width, sizes.hidden, true},
                     {prefix + "up_proj.weight", sizes.width, sizes.hidden, true},
                     {prefix + "down_proj.weight", sizes.hidden, sizes.width, true}};
  add_router(sizes, family);
  return family;
}

inline Family qwen_of_stacks(const Sizes& sizes) {
  Family family{.keys = qwen_keys(sizes, "qwen3_moe")};
  family.matrices = {{kMlp + "experts.gate_up_proj", 2 * sizes.width, sizes.hidden, true},
                     {kMlp + "experts.down_proj", sizes.hidden, sizes.width, true}};
  add_router(sizes, family);
  return family;
}

inline Family qwen_with_shared(const Sizes& sizes) {
  Family family{.keys = qwen_keys(sizes, "qwen2_moe") +
                        fmt::format(R"(,"shared_expert_intermediate_size":{})", sizes.width)};
  add_each(kMlp + "experts", {"gate_proj", "up_proj", "down_proj"}, sizes, family);
  const std::string shared = kMlp + "shared_expert.";
  family.matrices.push_back({shared + "gate_proj.weight", sizes.width, sizes.hidden});
  family.matrices.push_back({shared + "up_proj.weight", sizes.width, sizes.hidden});
  family.matrices.push_back({shared + "down_proj.weight", sizes.hidden, sizes.width});
  family.matrices.push_back({kMlp + "shared_expert_gate.weight", 1, sizes.hidden, false, false});
  add_router(sizes, family);
  return family;
}

inline Family gpt_oss(const Sizes& sizes) {
  Family family{
      .keys = fmt::format(
          R"("model_type":"gpt_oss","hidden_size":{},"intermediate_size":{},"num_local_experts":{},)"
          R"("num_experts_per_tok":1,"num_hidden_layers":1,"swiglu_limit":7.0,"hidden_act":"silu",)"
          R"("dtype":"bfloat16")",
          sizes.hidden, sizes.width, kExperts)};
  const std::string experts = kMlp + "experts.";
  family.matrices = {{experts + "gate_up_proj", 2 * sizes.width, sizes.hidden, true},
                     {experts + "down_proj", sizes.hidden, sizes.width, true},
                     {experts + "gate_up_proj_bias", kExperts, 2 * sizes.width, false, false},
                     {experts + "down_proj_bias", kExperts, sizes.hidden, false, false},
                     {kMlp + "router.weight", kExperts, sizes.hidden, false, false},
                     {kMlp + "router.bias", 0, kExperts, false, false}};
  return family;
}

inline Family deepseek_of_fp4(const Sizes& sizes) {
  Family family{.keys = fmt::format(
                    R"("model_type":"deepseek_v4","hidden_size":{},"moe_intermediate_size":{},)"
                    R"("n_routed_experts":{},"n_shared_experts":1,"num_experts_per_tok":1,)"
                    R"("num_hidden_layers":1,"norm_topk_prob":true,"routed_scaling_factor":1.5,)"
                    R"("scoring_func":"sqrtsoftplus","swiglu_limit":2.0,"mlp_layer_types":["moe"],)"
                    R"("hidden_act":"silu","dtype":"bfloat16","expert_dtype":"fp4")",
                    sizes.hidden, sizes.width, kExperts),
                .experts = "fp4"};
  add_each("layers.0.ffn.experts", {"w1", "w3", "w2"}, sizes, family);
  const std::string shared = "layers.0.ffn.shared_experts.";
  family.matrices.push_back({shared + "w1.weight", sizes.width, sizes.hidden, false, false});
  family.matrices.push_back({shared + "w3.weight", sizes.width, sizes.hidden, false, false});
  family.matrices.push_back({shared + "w2.weight", sizes.hidden, sizes.width, false, false});
  family.matrices.push_back({"layers.0.ffn.gate.weight", kExperts, sizes.hidden, false, false});
  family.matrices.push_back({"layers.0.ffn.gate.bias", 0, kExperts, false, false});
  return family;
}

inline constexpr std::array kFamilies = {qwen_of_experts,  qwen_of_mlx, qwen_of_stacks,
                                         qwen_with_shared, gpt_oss,     deepseek_of_fp4};

}  // namespace conclave::testing
