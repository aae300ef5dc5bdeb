// The common part of the Qwen tables, and of families made after them.
#pragma once

#include "checkpoint/architectures/tables.h"

namespace conclave::inline v0::checkpoint {

constexpr Architecture qwen_table(std::string_view name, std::span<const std::string_view> types,
                                  FlagKey renormalize) {
  return {
      .name = name,
      .model_types = types,
      .bases = kMlpBase,
      .sizes = {.num_experts = {"num_experts", "num_local_experts"},
                .top_k = "num_experts_per_tok",
                .intermediate_size = "moe_intermediate_size"},
      .layer_rule = {.dense_layers = "mlp_only_layers",
                     .sparse_step = {"decoder_sparse_step", 1},
                     .kinds = "mlp_layer_types"},
      .router = {.renormalize = renormalize},
  };
}

}  // namespace conclave::inline v0::checkpoint
