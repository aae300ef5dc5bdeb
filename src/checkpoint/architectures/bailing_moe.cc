// Ling and Ring: the first version is softmax without a bias, the second the router of DeepSeek-V3;
// configurations of both say "bailing_moe".
#include "checkpoint/architectures/deepseek_v3_table.h"
#include "checkpoint/architectures/tables.h"
#include "checkpoint/config_reader.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 2> kV1Types = {"bailing_moe", "bailing_moe_linear"};
constexpr std::array<std::string_view, 2> kV2Types = {"bailing_moe_v2", "bailing_moe_linear_v2"};
constexpr std::array<std::string_view, 1> kHybridTypes = {"bailing_hybrid"};
constexpr std::array kOnce = {NamePattern{"{base}gate.expert_bias", Part::kSelectionBias}};

constexpr Architecture v2_table(std::string_view name, std::span<const std::string_view> types) {
  Architecture table = deepseek_v3_table(name, types, {});
  table.router.selection_bias = {"moe_router_enable_expert_bias", true};
  table.shared.size = {.key = "moe_shared_expert_intermediate_size"};
  table.once = kOnce;
  return table;
}

// Configurations of the second version name a score.
const Architecture* choose_version(const ConfigReader& config) {
  return config.text("score_function", "softmax") == "softmax" ? nullptr : &kBailingMoeV2;
}

constexpr Architecture v1_table() {
  Architecture table = v2_table("bailing_moe", kV1Types);
  table.router.score = RouterScore::kSoftmax;
  table.router.logits = RouterPrecision::kModel;
  table.router.selection_bias = {"moe_router_enable_expert_bias", false};
  table.choose = choose_version;
  return table;
}

constexpr Architecture hybrid_table() {
  Architecture table =
      deepseek_v3_table("bailing_hybrid", kHybridTypes,
                        {.first_moe = 2, .scale = 2.5, .num_groups = 8, .topk_groups = 4});
  table.once = kOnce;
  return table;
}

}  // namespace

constinit const Architecture kBailingMoe = v1_table();
constinit const Architecture kBailingMoeV2 = v2_table("bailing_moe_v2", kV2Types);
constinit const Architecture kBailingHybrid = hybrid_table();

}  // namespace conclave::inline v0::checkpoint
