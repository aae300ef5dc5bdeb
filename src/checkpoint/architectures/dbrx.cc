// DBRX: experts flat in two dimensions, the down projection transposed; softmax in the type of the
// model, weights divided by their p-norm.
#include "checkpoint/architectures/tables.h"
#include "checkpoint/config_reader.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 1> kModelTypes = {"dbrx"};
constexpr std::array<std::string_view, 1> kBases = {"ffn."};
constexpr std::array kFlat = {
    NamePattern{.text = "{base}experts.mlp.w1",
                .part = Part::kGate,
                .axes = AxisOrder::kRowsFirst,
                .experts = ExpertAxis::kMerged},
    NamePattern{.text = "{base}experts.mlp.v1",
                .part = Part::kUp,
                .axes = AxisOrder::kRowsFirst,
                .experts = ExpertAxis::kMerged},
    NamePattern{.text = "{base}experts.mlp.w2",
                .part = Part::kDown,
                .axes = AxisOrder::kColsFirst,
                .experts = ExpertAxis::kMerged},
};
constexpr std::array kForms = {ExpertForm{"flat", kFlat}};
constexpr std::array kOnce = {NamePattern{"{base}router.layer.weight", Part::kRouter}};

constexpr NumberKey kNorm = {"ffn_config.moe_normalize_expert_weights", 1};

// The key holds p; null, unlike a missing key, means no norm.
void read_norm(const ConfigReader& config, int64_t, MoeSpec& spec, Support&) {
  const bool none = config.has(kNorm.key) && !config.find(kNorm.key);
  spec.router.renormalize = none ? Renormalize::kNone : Renormalize::kPNorm;
  if (!none) spec.router.renormalize_p = config.number(kNorm);
}

}  // namespace

constinit const Architecture kDbrx = {
    .name = "dbrx",
    .model_types = kModelTypes,
    .layers = "blocks",
    .bases = kBases,
    .sizes = {.num_experts = "ffn_config.moe_num_experts",
              .top_k = "ffn_config.moe_top_k",
              .intermediate_size = "ffn_config.ffn_hidden_size",
              .hidden_size = {"d_model", "hidden_size"},
              .num_layers = {"n_layers", "num_hidden_layers"}},
    .router = {.scores = RouterPrecision::kModel},
    .activation = {.key = "ffn_config.ffn_act_fn.name"},
    .expert_forms = kForms,
    .once = kOnce,
    .adjust = read_norm,
};

}  // namespace conclave::inline v0::checkpoint
