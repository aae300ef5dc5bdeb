// Qwen1.5-MoE, Qwen2-MoE, Qwen3-Next, Qwen3.5 and Qwen4: dense layers by list or step, a shared
// expert behind a sigmoid gate. They differ in when weights are renormalised.
#include "checkpoint/architectures/qwen_table.h"
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kQwen2Types = {"qwen2_moe"};
constexpr std::array<std::string_view, 3> kNextTypes = {"qwen3_next", "qwen4_exp",
                                                        "qwen4_exp_text"};
constexpr std::array<std::string_view, 2> kQwen35Types = {"qwen3_5_moe", "qwen3_5_moe_text"};

constexpr std::array kOnce = {
    NamePattern{"{base}shared_expert.gate_proj.weight", Part::kSharedGate},
    NamePattern{"{base}shared_expert.up_proj.weight", Part::kSharedUp},
    NamePattern{"{base}shared_expert.down_proj.weight", Part::kSharedDown},
};

// `size` is the width of the shared expert if the configuration leaves it out.
constexpr Architecture with_shared(Architecture table, int64_t size) {
  table.shared = {.mode = SharedMode::kSigmoidGate,
                  .size = {"shared_expert_intermediate_size", size}};
  table.once = kOnce;
  return table;
}

}  // namespace

constinit const Architecture kQwen2Moe =
    with_shared(qwen_table("qwen2_moe", kQwen2Types, {"norm_topk_prob", false}), 5632);
constinit const Architecture kQwen3Next =
    with_shared(qwen_table("qwen3_next", kNextTypes, {"norm_topk_prob", true}), 512);
constinit const Architecture kQwen35Moe =
    with_shared(qwen_table("qwen3_5_moe", kQwen35Types, {.otherwise = true}), 512);

}  // namespace conclave::inline v0::checkpoint
