// DeepSeek-V3 and V3.2, Kimi-K2, A.X-K1 and the families that took over their MoE block.
#include "checkpoint/architectures/deepseek_v3_table.h"
#include "checkpoint/architectures/tables.h"
#include "checkpoint/config_reader.h"
#include "io/text.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 5> kV3Types = {"deepseek_v3", "deepseek_v32", "kimi_k2",
                                                      "kimi_k25", "kimi_vl"};
constexpr std::array<std::string_view, 1> kAxk1Types = {"axk1"};
constexpr std::array<std::string_view, 1> kAxk2Types = {"axk2"};
constexpr std::array<std::string_view, 1> kDots1Types = {"dots1"};
constexpr std::array<std::string_view, 2> kDots3Types = {"dots3_note", "dots3_note_text"};
constexpr std::array<std::string_view, 1> kSolarTypes = {"solar_open"};
constexpr std::array<std::string_view, 1> kMimoTypes = {"mimo_v2_flash"};

// Early configurations name the method; without the key it is this one.
void require_noaux_tc(const ConfigReader& config, int64_t, MoeSpec&, Support& support) {
  const std::string method = config.text("topk_method", "noaux_tc");
  if (method == "noaux_tc") return;
  support = Support::no("topk_method " + io::show_text(method) +
                        " is none that this version knows for the family");
}

constexpr Architecture v3_table() {
  Architecture table = deepseek_v3_table(
      "deepseek_v3", kV3Types, {.first_moe = 3, .scale = 2.5, .num_groups = 8, .topk_groups = 4});
  table.adjust = require_noaux_tc;
  return table;
}

// If the file has no bias, transformers runs without it, as the release does.
constexpr Architecture axk1_table() {
  Architecture table = deepseek_v3_table(
      "axk1", kAxk1Types, {.first_moe = 1, .scale = 2.5, .num_groups = 8, .topk_groups = 4});
  table.router.selection_bias_by_file = true;
  return table;
}

constexpr Architecture axk2_table() {
  Architecture table = deepseek_v3_table("axk2", kAxk2Types, {.first_moe = 1, .scale = 2.5});
  table.router.group_mask = GroupMask::kZero;
  return table;
}

constexpr Architecture dots3_table() {
  Architecture table = deepseek_v3_table("dots3_note", kDots3Types, {.first_moe = 1});
  table.shared.size = {{"moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"},
                       1536};
  return table;
}

}  // namespace

constinit const Architecture kDeepseekV3 = v3_table();
constinit const Architecture kAxk1 = axk1_table();
constinit const Architecture kAxk2 = axk2_table();
constinit const Architecture kDots1 =
    deepseek_v3_table("dots1", kDots1Types, {.normalise = false, .shared_experts = 0});
constinit const Architecture kDots3Note = dots3_table();
constinit const Architecture kSolarOpen = deepseek_v3_table("solar_open", kSolarTypes, {});
// There is no shared expert: n_shared_experts is null.
constinit const Architecture kMimoV2Flash =
    deepseek_v3_table("mimo_v2_flash", kMimoTypes, {.first_moe = 1, .shared_experts = 0});

}  // namespace conclave::inline v0::checkpoint
