// Hunyuan: version 1 is softmax with a shared MLP, and its sizes may be lists with one value per
// layer; version 3 is sigmoid with a bias for choosing.
#include "checkpoint/architectures/deepseek_v3_table.h"
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 2> kV1Types = {"hunyuan_v1_moe", "hunyuan"};
constexpr std::array<std::string_view, 2> kV3Types = {"hy_v3", "hy_mt2"};
constexpr std::array kV1Once = {
    NamePattern{"{base}gate.wg.weight", Part::kRouter},
    NamePattern{"{base}shared_mlp.gate_proj.weight", Part::kSharedGate},
    NamePattern{"{base}shared_mlp.up_proj.weight", Part::kSharedUp},
    NamePattern{"{base}shared_mlp.down_proj.weight", Part::kSharedDown},
};
constexpr std::array kV3Once = {
    NamePattern{"{base}router.gate.weight", Part::kRouter},
    NamePattern{"{base}expert_bias", Part::kSelectionBias},
    NamePattern{"{base}shared_mlp.gate_proj.weight", Part::kSharedGate},
    NamePattern{"{base}shared_mlp.up_proj.weight", Part::kSharedUp},
    NamePattern{"{base}shared_mlp.down_proj.weight", Part::kSharedDown},
};

constexpr Architecture v3_table() {
  Architecture table = deepseek_v3_table("hy_v3", kV3Types, {.first_moe = 1});
  table.router.renormalize = {"route_norm", true};
  table.router.scale = {"router_scaling_factor", 2.826};
  table.shared_bias = {"mlp_bias", false};
  table.once = kV3Once;
  return table;
}

}  // namespace

constinit const Architecture kHunyuanV1Moe = {
    .name = "hunyuan_v1_moe",
    .model_types = kV1Types,
    .bases = kMlpBase,
    .sizes = {.num_experts = {"num_experts", "num_local_experts"},
              .top_k = {"moe_topk", "num_experts_per_tok"},
              .intermediate_size = {"moe_intermediate_size", "intermediate_size"}},
    .layer_rule = {.first_moe = {"moe_layer_num_skipped", 0}},
    .router = {.logits = RouterPrecision::kStored},
    .shared = {.mode = SharedMode::kAdd,
               .size = {.key = "intermediate_size"},
               .count = {"num_shared_expert", 1},
               .enabled = {"use_mixed_mlp_moe", true}},
    .once = kV1Once,
};
constinit const Architecture kHyV3 = v3_table();

}  // namespace conclave::inline v0::checkpoint
