// Lists the members of the structs that describe a layer, once: whoever compares, hashes or prints
// all of them visits this list.
#pragma once

#include "conclave/layer.h"
#include "conclave/spec.h"

#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

namespace conclave::inline v0 {

// The names are those of the members, in their order. The binding has to unpack the whole struct:
// one that gets a member does not compile until the member is listed. A macro, since nothing else
// makes values and names from one list.
#define CONCLAVE_LIST_FIELDS(Struct, ...)       \
  inline auto tie_fields(const Struct& value) { \
    const auto& [__VA_ARGS__] = value;          \
    return std::tie(__VA_ARGS__);               \
  }                                             \
  constexpr std::string_view field_names(const Struct& /*value*/) { return #__VA_ARGS__; }

CONCLAVE_LIST_FIELDS(RouterInputNorm, enabled, epsilon)
CONCLAVE_LIST_FIELDS(SimulatedRouting, distribution, seed, zipf_exponent, replay_ids,
                     replay_weights)
CONCLAVE_LIST_FIELDS(RouterSpec, name, score, order, has_logit_bias, soft_cap, has_selection_bias,
                     num_groups, topk_groups, group_score, group_mask, renormalize, renormalize_p,
                     epsilon, epsilon_mode, scale, has_expert_scale, has_global_scale,
                     jitter_epsilon, vocab_size, simulated, input_norm, logits_dtype, score_dtype,
                     options)
CONCLAVE_LIST_FIELDS(ActivationSpec, name, limit, alpha, beta, linear_beta)
CONCLAVE_LIST_FIELDS(SharedExpertSpec, mode, intermediate_size, count, activation, has_bias,
                     slot_weight, weight_dtype)
CONCLAVE_LIST_FIELDS(LatentSpec, size, has_norm, norm_epsilon)
CONCLAVE_LIST_FIELDS(ResidualMlpSpec, intermediate_size, activation, weight_dtype)
CONCLAVE_LIST_FIELDS(MatrixCodes, dtype, block_cols, has_zeros, scale_values, zero_values)
CONCLAVE_LIST_FIELDS(QuantSpec, weights, block_rows, block_cols, activations, activation_group,
                     activation_dtype, activation_scale_rule, power_of_two_scales, signed_scales,
                     scale_values, zeros, zero_values, has_global_scale, has_column_order,
                     has_column_factors, gate_up_codes, down_codes)
CONCLAVE_LIST_FIELDS(MoeSpec, num_experts, top_k, hidden_size, intermediate_size, weight_dtype,
                     quant, router, activation, shared, has_gate, has_bias, has_output_bias,
                     num_zero_experts, weight_on, output_scale, latent, residual)
CONCLAVE_LIST_FIELDS(LayerOptions, max_tokens, id_policy, kernel, arithmetic, transport, ep_combine,
                     chunk_order, micro_batch_tokens, determinism, weights, spare_experts,
                     max_adapter_rank, tuning)
CONCLAVE_LIST_FIELDS(ParallelSpec, ep_size, ep_rank, placement, rank_of, num_redundant_experts,
                     replica_of, tp_size, tp_rank, reduce)
#undef CONCLAVE_LIST_FIELDS

template <class Value>
concept HasFields = requires(const Value& value) { tie_fields(value); };

// Calls visit(name, value) for each member that is no such struct itself, in order and in depth.
// `prefix` is put before the names: "quant.block_rows", "shared.activation.name".
template <class Struct, class Visit>
void for_each_field(const Struct& value, const std::string& prefix, const Visit& visit) {
  std::string_view left = field_names(value);
  const auto take_name = [&] {
    const size_t end = left.find(',');
    std::string name = prefix;
    name += left.substr(0, end);
    left.remove_prefix(end == std::string_view::npos ? left.size()
                                                     : left.find_first_not_of(' ', end + 1));
    return name;
  };
  const auto visit_one = [&](const auto& member) {
    const std::string name = take_name();
    if constexpr (HasFields<std::remove_cvref_t<decltype(member)>>) {
      for_each_field(member, name + ".", visit);
    } else {
      visit(name, member);
    }
  };
  std::apply([&](const auto&... members) { (visit_one(members), ...); }, tie_fields(value));
}

}  // namespace conclave::inline v0
