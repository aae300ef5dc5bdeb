// Mistral 4: softmax, groups by the sum of their two best, excluded experts score 0. Large 4 routes
// in float32 and names its tensors without a block.
#include "checkpoint/architectures/deepseek_v3_table.h"
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kMistral4Types = {"mistral4"};
constexpr std::array<std::string_view, 2> kLargeTypes = {"mistral_large4", "mistral_large4_text"};
constexpr std::array<std::string_view, 2> kLargeBases = {"", "mlp."};
constexpr std::array<std::string_view, 3> kLargeBlocks = {"gate.", "experts.", "shared_experts."};
constexpr std::array kLargeExperts = {
    NamePattern{"{base}experts.{expert}.w1.weight", Part::kGate},
    NamePattern{"{base}experts.{expert}.w3.weight", Part::kUp},
    NamePattern{"{base}experts.{expert}.w2.weight", Part::kDown},
};
constexpr std::array kLargeForms = {ExpertForm{"per_expert", kLargeExperts}};
constexpr std::array kLargeOnce = {
    NamePattern{"{base}shared_experts.w1.weight", Part::kSharedGate},
    NamePattern{"{base}shared_experts.w3.weight", Part::kSharedUp},
    NamePattern{"{base}shared_experts.w2.weight", Part::kSharedDown},
};

constexpr Architecture table(std::string_view name, std::span<const std::string_view> types,
                             int64_t first_moe) {
  Architecture result = deepseek_v3_table(name, types, {.first_moe = first_moe});
  result.router.score = RouterScore::kSoftmax;
  result.router.selection_bias = {};
  result.router.group_mask = GroupMask::kZero;
  return result;
}

constexpr Architecture mistral4_table() {
  Architecture result = table("mistral4", kMistral4Types, 0);
  result.router.logits = RouterPrecision::kModel;
  result.router.scores = RouterPrecision::kModel;
  return result;
}

constexpr Architecture large_table() {
  Architecture result = table("mistral_large4", kLargeTypes, 1);
  result.router.renormalize = {.otherwise = true};
  result.bases = kLargeBases;
  result.more_blocks = kLargeBlocks;
  result.expert_forms = kLargeForms;
  result.once = kLargeOnce;
  return result;
}

}  // namespace

constinit const Architecture kMistral4 = mistral4_table();
constinit const Architecture kMistralLarge4 = large_table();

}  // namespace conclave::inline v0::checkpoint
