// Klear: sigmoid with a bias for choosing; a learned softmax mixes the routed and the shared part.
#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array<std::string_view, 2> kModelTypes = {"Klear", "klear"};
constexpr std::array kOnce = {
    NamePattern{"{base}expert_bias", Part::kSelectionBias},
    NamePattern{"{base}coefficient.weight", Part::kMixGate},
    NamePattern{"{base}coefficient.bias", Part::kMixGateBias},
};

}  // namespace

constinit const Architecture kKlear = {
    .name = "Klear",
    .model_types = kModelTypes,
    .bases = kMlpBase,
    .sizes = {.num_experts = {"num_experts", "num_local_experts"},
              .top_k = "num_experts_per_tok",
              .intermediate_size = "moe_intermediate_size"},
    .layer_rule = {.dense_layers = "mlp_only_layers", .sparse_step = {"decoder_sparse_step", 1}},
    .router = {.score = RouterScore::kSigmoid,
               .selection_bias = {.otherwise = true},
               .renormalize = {"norm_topk_prob", true}},
    .shared = {.mode = SharedMode::kSoftmaxMix, .count = {"n_shared_experts", 1}},
    .once = kOnce,
};

}  // namespace conclave::inline v0::checkpoint
