#include "layer/problems.h"

#include "core/part_spec.h"
#include "core/quant_spec.h"
#include "core/shared_facts.h"
#include "core/weight_types.h"
#include "quant/weight_format.h"

#include "conclave/error.h"
#include "conclave/lora.h"

#include <optional>
#include <string>
#include <variant>

namespace conclave::inline v0 {
namespace {

using experts::ExpertsProblem;

constexpr int32_t kMostSpareExperts = 1024;

// A part may have plain weights in a layer whose experts are quantised.
QuantSpec quant_for(const MoeSpec& spec, DType weights) {
  return weights == spec.weight_dtype ? spec.quant : QuantSpec{};
}

bool is_beside_quantised_rows(const MoeSpec& spec, DType weights) {
  return spec.quant.activations != ActivationScale::kNone && is_plain(weights);
}

// A CPU's panels hold no narrower codes, and a GPU has matrices in the layer's form but for codes
// that are narrower in all of them.
QuantSpec known_to(const experts::Target& target, QuantSpec quant) {
  const auto has_panels = [](const MatrixCodes& known) {
    return known.dtype && quant::find_panel_format(*known.dtype) != nullptr;
  };
  if (std::holds_alternative<experts::CpuTarget>(target)) {
    for (MatrixCodes* known : {&quant.gate_up_codes, &quant.down_codes}) {
      if (!has_panels(*known)) known->dtype.reset();
    }
    return quant;
  }
  const std::optional<DType> narrow =
      quant.gate_up_codes == quant.down_codes && !has_panels(quant.down_codes)
          ? quant.down_codes.dtype
          : std::nullopt;
  quant.gate_up_codes = {.dtype = narrow};
  quant.down_codes = {.dtype = narrow};
  return quant;
}

// Columns of a slice's first block of scales that lie before the slice.
int64_t skipped_columns(const QuantSpec& quant, const TensorSlice& inner) {
  const QuantSpec down = quant_of_matrix(quant, quant.down_codes);
  return down.weights == WeightScale::kBlock ? inner.begin % down.block_cols : 0;
}
int64_t skipped_rows(const QuantSpec& quant, const TensorSlice& inner) {
  return quant.weights == WeightScale::kBlock ? inner.begin % quant.block_rows : 0;
}

ExpertsProblem routed_problem(const MlpRequest& request) {
  const MoeSpec& spec = request.spec;
  const QuantSpec quant = known_to(request.target, spec.quant);
  return {.num_local_experts = request.part.num_places(),
          .hidden_size = expert_width(spec),
          .intermediate_size = request.part.inner.size(),
          .top_k = spec.top_k,
          .max_tokens = request.max_tokens,
          .max_adapter_rank = request.max_adapter_rank,
          .weight_dtype = spec.weight_dtype,
          .quant = quant_of_slice(quant, request.part.inner),
          .skipped_columns = skipped_columns(quant, request.part.inner),
          .skipped_rows = skipped_rows(quant, request.part.inner),
          .whole_intermediate_size = spec.intermediate_size,
          .has_float_rows = spec.latent.size != 0,
          .activation = activation::parse_activation(spec.activation),
          .has_bias = spec.has_bias,
          .reads_in_place = InPlaceParts::is(request.in_place.routed),
          .target = request.target};
}

ExpertsProblem shared_problem(const MlpRequest& request) {
  const MoeSpec& spec = request.spec;
  const DType dtype = shared_weight_dtype(spec);
  const QuantSpec quant = known_to(request.target, quant_for(spec, dtype));
  return {.num_local_experts = spec.shared.count,
          .hidden_size = spec.hidden_size,
          .intermediate_size = request.part.shared_inner.size(),
          .top_k = spec.shared.count,
          .max_tokens = request.max_tokens,
          .max_adapter_rank = request.max_adapter_rank,
          .weight_dtype = dtype,
          .quant = quant_of_slice(quant, request.part.shared_inner),
          .skipped_columns = skipped_columns(quant, request.part.shared_inner),
          .skipped_rows = skipped_rows(quant, request.part.shared_inner),
          .whole_intermediate_size = spec.shared.intermediate_size,
          .activation =
              activation::parse_activation(activation_or_routed(spec.shared.activation, spec)),
          .has_bias = spec.shared.has_bias,
          .reads_in_place = InPlaceParts::is(request.in_place.shared),
          .is_beside_quantised_rows = is_beside_quantised_rows(spec, dtype),
          .target = request.target};
}

ExpertsProblem residual_problem(const MlpRequest& request) {
  const MoeSpec& spec = request.spec;
  const DType dtype = spec.residual.weight_dtype.value_or(spec.weight_dtype);
  return {.num_local_experts = 1,
          .hidden_size = spec.hidden_size,
          .intermediate_size = request.part.residual_inner.size(),
          .top_k = 1,
          .max_tokens = request.max_tokens,
          .weight_dtype = dtype,
          .quant = quant_for(spec, dtype),
          .activation =
              activation::parse_activation(activation_or_routed(spec.residual.activation, spec)),
          .has_bias = false,
          .reads_in_place = InPlaceParts::is(request.in_place.residual),
          .is_beside_quantised_rows = is_beside_quantised_rows(spec, dtype),
          .target = request.target};
}

}  // namespace

QuantSpec quant_of_slice(QuantSpec quant, const TensorSlice& inner) {
  const QuantSpec down = quant_of_matrix(quant, quant.down_codes);
  const bool in_steps =
      down.scale_values == ScaleValues::kSteps || down.zero_values == ScaleValues::kSteps;
  if (!in_steps || inner.begin % kStepColumns < down.block_cols) return quant;
  quant.scale_values = quant.down_codes.scale_values = ScaleValues::kFloat;
  quant.zero_values = quant.down_codes.zero_values = ScaleValues::kFloat;
  return quant;
}

MlpProblems mlp_problems(const MlpRequest& request) {
  const MoeSpec& spec = request.spec;
  MlpProblems problems{.routed = routed_problem(request)};
  if (!request.part.holds_dense) return problems;
  if (shared_facts(spec).is_there) problems.shared = shared_problem(request);
  if (spec.residual.intermediate_size != 0) problems.residual = residual_problem(request);
  return problems;
}

void check_options(const LayerOptions& options, const experts::Target& target) {
  const int64_t most = experts::most_tokens(target);
  if (options.max_tokens < 1 || options.max_tokens > most) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "LayerOptions.max_tokens is out of range",
                                              .found = std::to_string(options.max_tokens),
                                              .limit = "1 to " + std::to_string(most)});
  }
  if (options.micro_batch_tokens < 0 ||
      (options.micro_batch_tokens > 0 && options.chunk_order != ChunkOrder::kMicroBatches)) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "LayerOptions.micro_batch_tokens cuts calls into micro-batches",
                 .expected = "0, or more with ChunkOrder::kMicroBatches",
                 .found = std::to_string(options.micro_batch_tokens)});
  }
  const auto check = [](const char* what, int32_t value, int32_t limit) {
    if (value >= 0 && value <= limit) return;
    throw Error(
        ErrorCode::kInvalidArgument,
        {.what = what, .found = std::to_string(value), .limit = "0 to " + std::to_string(limit)});
  };
  check("LayerOptions.spare_experts is out of range", options.spare_experts, kMostSpareExperts);
  check("LayerOptions.max_adapter_rank is out of range", options.max_adapter_rank,
        kMostAdapterRank);
}

}  // namespace conclave::inline v0
