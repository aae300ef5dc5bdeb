// Flint, Beam and Kolibri: sigmoid routers with small differences.
#include "checkpoint/architectures/deepseek_v3_table.h"
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kFlintTypes = {"flint"};
constexpr std::array<std::string_view, 1> kBeamTypes = {"beam"};
constexpr std::array<std::string_view, 1> kKolibriTypes = {"kolibri1"};
constexpr std::array<std::string_view, 2> kKolibriBases = {"mlp.", "moe."};
constexpr std::array kFlintOnce = {
    NamePattern{"{base}shared_expert.gate_proj.weight", Part::kSharedGate},
    NamePattern{"{base}shared_expert.up_proj.weight", Part::kSharedUp},
    NamePattern{"{base}shared_expert.down_proj.weight", Part::kSharedDown},
};
constexpr std::array kKolibriOnce = {NamePattern{"moe.router.expert_bias", Part::kSelectionBias}};

constexpr SizeKeys kSizes = {.num_experts = {"num_experts", "num_local_experts"},
                             .top_k = "num_experts_per_tok",
                             .intermediate_size = "moe_intermediate_size"};

constexpr Architecture beam_table() {
  Architecture table = deepseek_v3_table(
      "beam", kBeamTypes, {.first_moe = 3, .scale = 2.5, .num_groups = 8, .topk_groups = 4});
  table.router.scale_on = ScaleOn::kOutput;
  table.shared = {};
  return table;
}

}  // namespace

// There is no bias and no epsilon; the shared expert is simply added.
constinit const Architecture kFlint = {
    .name = "flint",
    .model_types = kFlintTypes,
    .bases = kMlpBase,
    .sizes = kSizes,
    .layer_rule = {.dense_layers = "mlp_only_layers",
                   .sparse_step = {"decoder_sparse_step", 1},
                   .first_moe = {.otherwise = 2}},
    .router = {.score = RouterScore::kSigmoid,
               .logits = RouterPrecision::kF32,
               .renormalize = {"norm_topk_prob", true}},
    .shared = {.mode = SharedMode::kAdd, .size = {"shared_expert_intermediate_size", 1024}},
    .once = kFlintOnce,
};
constinit const Architecture kBeam = beam_table();
// The bias is added to the logits, and the highest sums are chosen.
constinit const Architecture kKolibri1 = {
    .name = "kolibri1",
    .model_types = kKolibriTypes,
    .bases = kKolibriBases,
    .sizes = kSizes,
    .router = {.score = RouterScore::kSigmoid,
               .order = RouterOrder::kTopkThenScore,
               .logits = RouterPrecision::kF32,
               .selection_bias = {.otherwise = true},
               .renormalize = {"norm_topk_prob", false}},
    .shared = {.mode = SharedMode::kAdd, .size = {"shared_expert_intermediate_size", 512}},
    .once = kKolibriOnce,
};

}  // namespace conclave::inline v0::checkpoint
