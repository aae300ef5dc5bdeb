#include "spec_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <vector>

namespace conclave::tool {
namespace {

std::string_view score_name(RouterScore score) {
  switch (score) {
    case RouterScore::kSoftmax:
      return "softmax";
    case RouterScore::kSigmoid:
      return "sigmoid";
    case RouterScore::kSqrtSoftplus:
      return "sqrtsoftplus";
    case RouterScore::kNone:
      return "logit";
  }
  return "";
}

std::string_view weight_scale_name(WeightScale scale) {
  switch (scale) {
    case WeightScale::kNone:
      return "none";
    case WeightScale::kTensor:
      return "tensor";
    case WeightScale::kChannel:
      return "channel";
    case WeightScale::kBlock:
      return "block";
  }
  return "";
}

// Says what shares a scale in the rows; follows the weights.
std::string activation_scale_words(const QuantSpec& quant) {
  switch (quant.activations) {
    case ActivationScale::kNone:
      return "";
    case ActivationScale::kTensorStatic:
      return ", rows static";
    case ActivationScale::kToken:
      return ", rows by token";
    case ActivationScale::kGroup:
      return fmt::format(", rows by {}", quant.activation_group);
  }
  return "";
}

// Says what scales of rows are, but for quotients.
std::string_view scale_values_words(ScaleValues values) {
  switch (values) {
    case ScaleValues::kFloat:
      return "";
    case ScaleValues::kF16:
      return " of F16";
    case ScaleValues::kPowerOfTwo:
      return " of F8_E8M0";
    case ScaleValues::kSteps:
      return " in steps";
    case ScaleValues::kFloat8:
      return " of F8_E4M3";
  }
  return "";
}

std::string_view scale_rule_words(RowScaleRule rule) {
  switch (rule) {
    case RowScaleRule::kQuotient:
      return "";
    case RowScaleRule::kFloorPower:
      return " e8m0 floor";
    case RowScaleRule::kEvenPower:
      return " e8m0 even";
    case RowScaleRule::kHalfPower:
      return " e8m0 half";
    case RowScaleRule::kCeilPower:
      return " e8m0 ceil";
    case RowScaleRule::kTwoLevel:
      return " e4m3 two-level";
  }
  return "";
}

// Says what is taken from codes or their products.
std::string_view weight_zero_words(WeightZero zeros) {
  switch (zeros) {
    case WeightZero::kNone:
      return "";
    case WeightZero::kPoint:
      return ", zero points";
    case WeightZero::kOffset:
      return ", offsets";
  }
  return "";
}

struct SharedModeRow {
  SharedMode mode;
  std::string_view name;
  std::string_view word;  // behind the size
};
constexpr std::array kSharedModes = {
    SharedModeRow{SharedMode::kNone, "none", ""},
    SharedModeRow{SharedMode::kAdd, "add", ""},
    SharedModeRow{SharedMode::kSigmoidGate, "sigmoid_gate", " gated"},
    SharedModeRow{SharedMode::kAverage, "average", " average"},
    SharedModeRow{SharedMode::kSoftmaxMix, "softmax_mix", " mix"},
    SharedModeRow{SharedMode::kRouterWeight, "router_weight", " routed"},
    SharedModeRow{SharedMode::kFusedSlots, "fused_slots", " slots"},
};
const SharedModeRow& row_of(SharedMode mode) {
  const auto row = std::ranges::find(kSharedModes, mode, &SharedModeRow::mode);
  return row == kSharedModes.end() ? kSharedModes.front() : *row;
}

}  // namespace

std::string shared_text(const SharedExpertSpec& shared) {
  if (shared.mode == SharedMode::kNone) return "-";
  const std::string size = shared.count == 1
                               ? fmt::format("{}", shared.intermediate_size)
                               : fmt::format("{} x {}", shared.count, shared.intermediate_size);
  return size + std::string(row_of(shared.mode).word);
}

std::string_view shared_mode_name(SharedMode mode) { return row_of(mode).name; }

std::string_view renormalize_name(Renormalize renormalize) {
  switch (renormalize) {
    case Renormalize::kNone:
      return "none";
    case Renormalize::kSum:
      return "sum";
    case Renormalize::kPNorm:
      return "pnorm";
    case Renormalize::kSoftmax:
      return "softmax";
  }
  return "none";
}

std::string router_text(const RouterSpec& router) {
  std::string text = fmt::format("{} {}", router.name, score_name(router.score));
  if (router.num_groups > 1) text += fmt::format(" {}/{}", router.topk_groups, router.num_groups);
  if (router.has_selection_bias) text += " bias";
  if (router.renormalize != Renormalize::kNone) text += " renorm";
  return text;
}

// Says what is known of the codes of one kind of matrix.
std::string known_codes_text(std::string_view matrices, const MatrixCodes& known) {
  if (known == MatrixCodes{}) return "";
  std::string text = fmt::format(", {}", matrices);
  if (known.dtype) text += " " + std::string(to_string(*known.dtype));
  if (known.block_cols != 0) text += fmt::format(" 1x{}", known.block_cols);
  text += scale_values_words(known.scale_values);
  if (!known.has_zeros) text += " without zeros";
  return text;
}

std::string weights_text(const MoeSpec& spec) {
  std::string text(to_string(spec.weight_dtype));
  const QuantSpec& quant = spec.quant;
  if (quant.weights == WeightScale::kNone) return text;
  text += " " + std::string(weight_scale_name(quant.weights));
  if (quant.weights == WeightScale::kBlock) {
    text += fmt::format(" {}x{}", quant.block_rows, quant.block_cols);
  }
  text += scale_values_words(quant.scale_values);
  text += std::string(weight_zero_words(quant.zeros));
  text += known_codes_text("gate and up", quant.gate_up_codes);
  text += known_codes_text("down", quant.down_codes);
  if (quant.has_global_scale) text += ", global scale";
  if (quant.has_column_order) text += ", column order";
  if (quant.has_column_factors) text += ", column factors";
  text += activation_scale_words(quant);
  if (quant.activation_dtype) text += " in " + std::string(to_string(*quant.activation_dtype));
  text += scale_rule_words(quant.activation_scale_rule);
  if (quant.power_of_two_scales) text += " ue8m0";
  return text;
}

std::string parts_text(const MoeSpec& spec) {
  std::vector<std::string> parts;
  if (spec.latent.size != 0) parts.push_back(fmt::format("latent {}", spec.latent.size));
  if (spec.residual.intermediate_size != 0) {
    parts.push_back(fmt::format("residual {}", spec.residual.intermediate_size));
  }
  if (spec.num_zero_experts != 0) parts.push_back(fmt::format("{} zero", spec.num_zero_experts));
  if (spec.has_bias) parts.emplace_back("bias");
  if (spec.has_output_bias) parts.emplace_back("out bias");
  if (spec.weight_on == WeightOn::kInput) parts.emplace_back("weight on input");
  if (spec.output_scale != 1) parts.push_back(fmt::format("scale {:g}", spec.output_scale));
  return parts.empty() ? "-" : fmt::format("{}", fmt::join(parts, ", "));
}

}  // namespace conclave::tool
