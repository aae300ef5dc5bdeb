#include "capi/guard.h"
#include "capi/sources.h"
#include "capi/structs.h"
#include "capi/tensors.h"
#include "capi/values.h"

#include "conclave/error.h"
#include "conclave/refit.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <string_view>

namespace conclave::inline v0::capi {
namespace {

struct WeightField {
  std::string_view name;
  ConstTensorView ExpertWeights::*field;
};

#define CONCLAVE_WEIGHT(name) \
  WeightField { #name, &ExpertWeights::name }

// In the order of the struct. Tensors of a router's own go by its own list of names.
constexpr std::array kWeightFields = {
    CONCLAVE_WEIGHT(gate_up),
    CONCLAVE_WEIGHT(down),
    CONCLAVE_WEIGHT(router),
    CONCLAVE_WEIGHT(shared_gate_up),
    CONCLAVE_WEIGHT(shared_down),
    CONCLAVE_WEIGHT(shared_expert_gate),
    CONCLAVE_WEIGHT(gate_up_bias),
    CONCLAVE_WEIGHT(down_bias),
    CONCLAVE_WEIGHT(shared_gate_up_bias),
    CONCLAVE_WEIGHT(shared_down_bias),
    CONCLAVE_WEIGHT(router_bias),
    CONCLAVE_WEIGHT(selection_bias),
    CONCLAVE_WEIGHT(expert_scale),
    CONCLAVE_WEIGHT(global_scale),
    CONCLAVE_WEIGHT(router_input_scale),
    CONCLAVE_WEIGHT(mix_gate),
    CONCLAVE_WEIGHT(mix_gate_bias),
    CONCLAVE_WEIGHT(latent_down),
    CONCLAVE_WEIGHT(latent_norm),
    CONCLAVE_WEIGHT(latent_up),
    CONCLAVE_WEIGHT(output_bias),
    CONCLAVE_WEIGHT(residual_gate_up),
    CONCLAVE_WEIGHT(residual_down),
    CONCLAVE_WEIGHT(gate_up_scale),
    CONCLAVE_WEIGHT(down_scale),
    CONCLAVE_WEIGHT(gate_up_input_scale),
    CONCLAVE_WEIGHT(down_input_scale),
    CONCLAVE_WEIGHT(shared_gate_up_scale),
    CONCLAVE_WEIGHT(shared_down_scale),
    CONCLAVE_WEIGHT(shared_gate_up_input_scale),
    CONCLAVE_WEIGHT(shared_down_input_scale),
    CONCLAVE_WEIGHT(gate_up_zero),
    CONCLAVE_WEIGHT(down_zero),
    CONCLAVE_WEIGHT(shared_gate_up_zero),
    CONCLAVE_WEIGHT(shared_down_zero),
    CONCLAVE_WEIGHT(gate_up_global_scale),
    CONCLAVE_WEIGHT(down_global_scale),
    CONCLAVE_WEIGHT(shared_gate_up_global_scale),
    CONCLAVE_WEIGHT(shared_down_global_scale),
    CONCLAVE_WEIGHT(gate_up_column_order),
    CONCLAVE_WEIGHT(down_column_order),
    CONCLAVE_WEIGHT(shared_gate_up_column_order),
    CONCLAVE_WEIGHT(shared_down_column_order),
    CONCLAVE_WEIGHT(gate_up_column_factor),
    CONCLAVE_WEIGHT(down_column_factor),
    CONCLAVE_WEIGHT(shared_gate_up_column_factor),
    CONCLAVE_WEIGHT(shared_down_column_factor),
};
#undef CONCLAVE_WEIGHT

ExpertWeights weights_of(const NamedViews& views, const conclave_source_options& options) {
  ExpertWeights weights;
  for (const auto& [name, view] : views) {
    const auto row = std::ranges::find(kWeightFields, name, &WeightField::name);
    (row == kWeightFields.end() ? weights.router_tensors[name] : weights.*row->field) = view;
  }
  weights.order = choice_of("options.order", options.order, GateUpOrder::kSingle);
  weights.shared_order =
      choice_of("options.shared_order", options.shared_order, GateUpOrder::kSingle);
  weights.residual_order =
      choice_of("options.residual_order", options.residual_order, GateUpOrder::kSingle);
  weights.memory = choice_of("options.memory", options.memory, MemoryKind::kDevice);
  return weights;
}

static_assert(CONCLAVE_GATE_UP_ORDER_CONCATENATED ==
                  static_cast<int32_t>(GateUpOrder::kConcatenated) &&
              CONCLAVE_GATE_UP_ORDER_INTERLEAVED ==
                  static_cast<int32_t>(GateUpOrder::kInterleaved) &&
              CONCLAVE_GATE_UP_ORDER_SINGLE == static_cast<int32_t>(GateUpOrder::kSingle) &&
              CONCLAVE_MEMORY_HOST == static_cast<int32_t>(MemoryKind::kHost) &&
              CONCLAVE_MEMORY_DEVICE == static_cast<int32_t>(MemoryKind::kDevice));

std::unique_ptr<WeightSource> source_over(const ExpertWeights& weights,
                                          const conclave_source_options& options) {
  constexpr auto kMost = static_cast<int64_t>(kMostExperts);
  const auto experts = array_of(options.experts, options.experts_count, "options.experts",
                                "options.experts_count", kMostExperts);
  if (options.num_experts == 0 && experts.empty()) return make_pointer_source(weights);
  if (options.num_experts < 1 || options.num_experts > kMost) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a part of a layer says how many experts the layer has",
                 .tensor = "options.num_experts",
                 .found = std::to_string(options.num_experts),
                 .limit = "1 to " + std::to_string(kMost)});
  }
  return make_part_source(weights, options.num_experts, experts);
}

}  // namespace

NamedViews named_views(const conclave_named_tensor* tensors, size_t count) {
  // Names are not many, and a number that nobody has set is likely to be.
  constexpr size_t kMostTensors = 65536;
  array_of(tensors, count, "tensors", "the number of tensors", kMostTensors);
  NamedViews views;
  for (size_t i = 0; i < count; ++i) {
    const std::string place = "tensors[" + std::to_string(i) + "].name";
    const char* const name = &required(tensors[i].name, place.c_str());
    const bool is_new = views.emplace(name, needed_view(tensors[i].tensor, name)).second;
    if (is_new) continue;
    throw Error(ErrorCode::kTensorDuplicate, {.what = "a tensor comes twice", .tensor = name});
  }
  return views;
}

}  // namespace conclave::inline v0::capi

namespace capi = conclave::capi;

conclave_status conclave_source_from_tensors(const conclave_named_tensor* tensors, size_t count,
                                             const conclave_source_options* options,
                                             conclave_source** out) noexcept {
  return capi::guarded([&] {
    capi::required(out, "out");
    const conclave_source_options given = capi::take_optional(options, "options");
    const capi::NamedViews views = capi::named_views(tensors, count);
    capi::hand_out(out, capi::source_over(capi::weights_of(views, given), given));
  });
}

void conclave_source_destroy(conclave_source* source) noexcept { delete source; }
