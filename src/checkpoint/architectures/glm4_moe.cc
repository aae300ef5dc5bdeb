// GLM-4.5 to GLM-5 and their multimodal forms, Hunyuan 4: the MoE block of DeepSeek-V3.
#include "checkpoint/architectures/deepseek_v3_table.h"
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 3> kGlm4Types = {"glm4_moe", "glm4v_moe", "glm4v_moe_text"};
constexpr std::array<std::string_view, 1> kLiteTypes = {"glm4_moe_lite"};
constexpr std::array<std::string_view, 1> kDsaTypes = {"glm_moe_dsa"};
constexpr std::array<std::string_view, 2> kGlm5Types = {"glm5_next", "glm5_next_text"};
constexpr std::array<std::string_view, 1> kHyV4Types = {"hy_v4"};

constexpr ActivationRule kBounded = {.form = ActivationForm::kClampBefore,
                                     .limit = {"swiglu_limit", 10}};

constexpr Architecture glm5_table() {
  Architecture table = deepseek_v3_table("glm5_next", kGlm5Types, {.first_moe = 3, .scale = 2.5});
  table.activation = kBounded;
  return table;
}

// The shared expert has no bounds.
constexpr Architecture hy_v4_table() {
  Architecture table = deepseek_v3_table("hy_v4", kHyV4Types, {.first_moe = 1, .scale = 2.827});
  table.activation = kBounded;
  table.shared.activation = ActivationRule{};
  return table;
}

}  // namespace

constinit const Architecture kGlm4Moe = deepseek_v3_table("glm4_moe", kGlm4Types, {.first_moe = 1});
constinit const Architecture kGlm4MoeLite =
    deepseek_v3_table("glm4_moe_lite", kLiteTypes, {.first_moe = 1, .scale = 1.8});
constinit const Architecture kGlmMoeDsa =
    deepseek_v3_table("glm_moe_dsa", kDsaTypes, {.first_moe = 3, .scale = 2.5});
constinit const Architecture kGlm5Next = glm5_table();
constinit const Architecture kHyV4 = hy_v4_table();

}  // namespace conclave::inline v0::checkpoint
