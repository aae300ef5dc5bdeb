// EXAONE MoE: the block of DeepSeek-V3 with the bias beside the router.
#include "checkpoint/architectures/deepseek_v3_table.h"
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kModelTypes = {"exaone_moe"};
constexpr std::array kOnce = {NamePattern{"{base}e_score_correction_bias", Part::kSelectionBias}};

constexpr Architecture table() {
  Architecture result =
      deepseek_v3_table("exaone_moe", kModelTypes, {.first_moe = 1, .scale = 2.5});
  result.once = kOnce;
  return result;
}

}  // namespace

constinit const Architecture kExaoneMoe = table();

}  // namespace conclave::inline v0::checkpoint
