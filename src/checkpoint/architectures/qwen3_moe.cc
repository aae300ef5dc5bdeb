// Qwen3-MoE and its multimodal forms, and Mellum: Qwen2-MoE without the shared expert. Released
// checkpoints of Qwen3-MoE set norm_topk_prob; the published default is off.
#include "checkpoint/architectures/qwen_table.h"
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kQwen3Types = {"qwen3_moe"};
constexpr std::array<std::string_view, 4> kOmniTypes = {"qwen3_omni_moe", "qwen3_omni_moe_thinker",
                                                        "qwen3_omni_moe_text", "mellum"};
constexpr std::array<std::string_view, 2> kVlTypes = {"qwen3_vl_moe", "qwen3_vl_moe_text"};
// The speech part has experts of its own, under another configuration.
constexpr std::array<std::string_view, 1> kOmniSkipped = {"talker."};

constexpr Architecture omni_table() {
  Architecture table = qwen_table("qwen3_omni_moe", kOmniTypes, {"norm_topk_prob", true});
  table.skipped = kOmniSkipped;
  return table;
}

}  // namespace

constinit const Architecture kQwen3Moe =
    qwen_table("qwen3_moe", kQwen3Types, {"norm_topk_prob", false});
constinit const Architecture kQwen3OmniMoe = omni_table();
// Weights are always renormalised; released files hold stacks columns first.
constinit const Architecture kQwen3VlMoe =
    qwen_table("qwen3_vl_moe", kVlTypes, {.otherwise = true});

}  // namespace conclave::inline v0::checkpoint
