// DeepSeek-V2 and the readers built on it: softmax, groups by their best expert, excluded experts
// score 0. transformers never renormalises, whatever norm_topk_prob says.
#include "checkpoint/architectures/deepseek_v3_table.h"
#include "checkpoint/architectures/tables.h"
#include "checkpoint/config_reader.h"
#include "io/text.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 5> kV2Types = {
    "deepseek_v2", "deepseek_vl_v2", "deepseek_vl2", "deepseek_ocr2", "deepseek_ocr2_text"};
constexpr std::array<std::string_view, 2> kOcrTypes = {"unlimited_ocr", "unlimited_ocr_text"};

// "greedy" has no groups, even if the configuration numbers them.
void apply_method(const ConfigReader& config, int64_t, MoeSpec& spec, Support& support) {
  const std::string method = config.text("topk_method", "greedy");
  if (method == "group_limited_greedy") return;
  spec.router.num_groups = 1;
  spec.router.topk_groups = 1;
  if (method == "greedy") return;
  support = Support::no("topk_method " + io::show_text(method) +
                        " is none that this version knows for the family");
}

constexpr Architecture v2_table(std::string_view name, std::span<const std::string_view> types,
                                int64_t first_moe) {
  Architecture table =
      deepseek_v3_table(name, types, {.first_moe = first_moe, .shared_experts = 2});
  table.router = {.logits = RouterPrecision::kF32,
                  .num_groups = {"n_group", 1},
                  .topk_groups = {"topk_group", 1},
                  .group_score = GroupScore::kMax,
                  .group_mask = GroupMask::kZero,
                  .renormalize = {.otherwise = false},
                  .scale = {"routed_scaling_factor", 1}};
  table.adjust = apply_method;
  return table;
}

}  // namespace

constinit const Architecture kDeepseekV2 = v2_table("deepseek_v2", kV2Types, 0);
constinit const Architecture kUnlimitedOcr = v2_table("unlimited_ocr", kOcrTypes, 1);

}  // namespace conclave::inline v0::checkpoint
