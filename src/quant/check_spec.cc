#include "quant/check_spec.h"

#include "core/part_spec.h"
#include "core/quant_spec.h"
#include "core/shared_facts.h"
#include "core/weight_types.h"
#include "quant/activation_rows.h"
#include "quant/weight_format.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <string>
#include <utility>

namespace conclave::inline v0::quant {
namespace {

[[noreturn]] void refuse(const char* field, std::string found, std::string limit) {
  throw Error(ErrorCode::kInvalidArgument,
              {.what = std::string("MoeSpec.") + field + " does not fit the layer",
               .found = std::move(found),
               .limit = std::move(limit)});
}

[[noreturn]] void refuse_type(const char* field, DType dtype, std::string expected) {
  throw Error(ErrorCode::kDType, {.what = std::string("MoeSpec.") + field + " is not a weight type",
                                  .expected = std::move(expected),
                                  .found = std::string(to_string(dtype))});
}

template <class Choice>
void check_choice(const char* field, Choice value, Choice last) {
  if (value <= last) return;
  refuse(field, std::to_string(static_cast<int>(value)),
         "0 to " + std::to_string(static_cast<int>(last)));
}

void check_block(const char* field, int64_t size, bool in_blocks) {
  if (!in_blocks && size != QuantSpec{}.block_rows) {
    refuse(field, std::to_string(size), "128 but for WeightScale::kBlock");
  }
  if (size >= 1 && size <= kMaxSpecSize) return;
  refuse(field, std::to_string(size), "1 to " + std::to_string(kMaxSpecSize));
}

void check_group(const QuantSpec& quant) {
  const int64_t size = quant.activation_group;
  if (quant.activations != ActivationScale::kGroup && size != QuantSpec{}.activation_group) {
    refuse("quant.activation_group", std::to_string(size), "128 but for ActivationScale::kGroup");
  }
  if (size >= 1 && size <= kMaxSpecSize) return;
  refuse("quant.activation_group", std::to_string(size), "1 to " + std::to_string(kMaxSpecSize));
}

// Scales of such rules are made for floats.
void check_float_rows(DType rows) {
  const quant::CodeBook* const codes = quant::find_row_codes(rows);
  if (codes != nullptr && codes->mantissa_bits) return;
  refuse("quant.activation_dtype", std::string(to_string(rows)),
         "one of " + quant::float_row_types() + " but for RowScaleRule::kQuotient");
}

void check_scale_rule(const MoeSpec& spec) {
  const QuantSpec& quant = spec.quant;
  if (quant.activation_scale_rule == RowScaleRule::kQuotient) return;
  const std::string found = std::to_string(static_cast<int>(quant.activation_scale_rule));
  if (quant.activations != ActivationScale::kGroup) {
    refuse("quant.activation_scale_rule", found,
           "RowScaleRule::kQuotient but for ActivationScale::kGroup");
  }
  if (quant.power_of_two_scales) {
    refuse("quant.power_of_two_scales", "true", "false but for RowScaleRule::kQuotient");
  }
  if (!quant.activation_dtype) {
    check_float_rows(quant::format_of(spec.weight_dtype).row_codes->element);
  }
}

// Whole numbers go beside some weights only, and are named where they are usual.
std::string quotient_row_types(DType weights) {
  const CodeBook& usual = *format_of(weights).row_codes;
  std::string text(to_string(usual.element));
  for (const WeightFormat& format : format_catalog().rows()) {
    const bool are_floats = format.codes != nullptr && format.codes->mantissa_bits;
    if (!are_floats || format.element == usual.element) continue;
    if (!takes_quotient_rows(weights, format.element)) continue;
    text += " or " + std::string(to_string(format.element));
  }
  return text;
}

void check_row_type(const MoeSpec& spec) {
  const std::optional<DType>& rows = spec.quant.activation_dtype;
  if (!rows) return;
  const std::string found(to_string(*rows));
  if (spec.quant.activations == ActivationScale::kNone) {
    refuse("quant.activation_dtype", found, "none for ActivationScale::kNone");
  }
  if (spec.quant.activation_scale_rule != RowScaleRule::kQuotient) return check_float_rows(*rows);
  if (takes_quotient_rows(spec.weight_dtype, *rows)) return;
  refuse("quant.activation_dtype", found,
         fmt::format("{} beside weights of {}", quotient_row_types(spec.weight_dtype),
                     to_string(spec.weight_dtype)));
}

// The columns of one step are those of whole scales.
bool fit_steps(const QuantSpec& quant) {
  return quant.weights == WeightScale::kBlock && kStepColumns % quant.block_cols == 0;
}
std::string steps_limit() {
  return fmt::format("another but for WeightScale::kBlock with block_cols that divide {}",
                     kStepColumns);
}

void check_types(const MoeSpec& spec) {
  const bool quantised = !is_plain(spec.weight_dtype);
  if (find_format(spec.weight_dtype) == nullptr) {
    refuse_type("weight_dtype", spec.weight_dtype, known_formats(true));
  }
  const DType shared = shared_weight_dtype(spec);
  if (!is_plain(shared) && shared != spec.weight_dtype) {
    const std::string plain = known_formats(false);
    refuse_type("shared.weight_dtype", shared,
                quantised ? plain + ", or " + std::string(to_string(spec.weight_dtype)) +
                                " as the experts have"
                          : plain + " beside experts that are not quantised");
  }
  if (!shared_facts(spec).is_there && spec.shared.weight_dtype) {
    refuse("shared.weight_dtype", std::string(to_string(shared)), "none without shared experts");
  }
  if (spec.residual.intermediate_size == 0) {
    if (!spec.residual.weight_dtype) return;
    refuse("residual.weight_dtype", std::string(to_string(*spec.residual.weight_dtype)),
           "none where residual.intermediate_size is 0");
  }
  const DType residual = spec.residual.weight_dtype.value_or(spec.weight_dtype);
  if (!is_plain(residual)) {
    refuse_type("residual.weight_dtype", residual, known_formats(false));
  }
}

// One kind of matrix must be known to have less than the layer's form allows.
class KnownCheck {
 public:
  KnownCheck(const MoeSpec& spec, const char* field, const MatrixCodes& known)
      : spec_(spec), quant_(spec.quant), field_(field), known_(known) {}

  void run() const {
    if (known_ == MatrixCodes{}) return;
    if (is_plain(spec_.weight_dtype)) {
      refuse_known("", "given",
                   "absent for weights of " + std::string(to_string(spec_.weight_dtype)));
    }
    check_dtype();
    check_columns();
    check_zeros();
    check_choice(name(".scale_values").c_str(), known_.scale_values, ScaleValues::kFloat8);
    check_choice(name(".zero_values").c_str(), known_.zero_values, ScaleValues::kSteps);
    check_steps();
  }

 private:
  std::string name(const char* member) const { return "quant." + std::string(field_) + member; }
  [[noreturn]] void refuse_known(const char* member, std::string found, std::string limit) const {
    refuse(name(member).c_str(), std::move(found), std::move(limit));
  }

  void check_dtype() const {
    if (!known_.dtype) return;
    const DType type = *known_.dtype;
    const WeightFormat* const format = find_known_format(type);
    const bool has_codes = format != nullptr && format->codes != nullptr;
    if (has_codes && bit_size(type) < bit_size(spec_.weight_dtype) &&
        has_values_of(spec_.weight_dtype, type)) {
      const Support takes = format->takes(quant_of_matrix(quant_, known_));
      if (takes) return;
      refuse_known(".dtype", std::string(to_string(type)), takes.reason());
    }
    refuse_known(".dtype", std::string(to_string(type)),
                 "codes of fewer bits than " + std::string(to_string(spec_.weight_dtype)) +
                     ", which has all of their values");
  }

  void check_columns() const {
    if (known_.block_cols == 0) return;
    const bool has_groups =
        quant_.weights == WeightScale::kBlock && quant_.block_rows == 1 && !quant_.has_column_order;
    if (has_groups && known_.block_cols > 0 && known_.block_cols <= kMaxSpecSize &&
        known_.block_cols % quant_.block_cols == 0) {
      return;
    }
    refuse_known(".block_cols", std::to_string(known_.block_cols),
                 fmt::format("0 or, for WeightScale::kBlock with block_rows 1 and no column order, "
                             "a multiple of quant.block_cols, {}",
                             quant_.block_cols));
  }

  void check_zeros() const {
    if (!known_.has_zeros && quant_.zeros == WeightZero::kNone) {
      refuse_known(".has_zeros", "false", "true for WeightZero::kNone");
    }
    if (known_.zero_values == ScaleValues::kFloat) return;
    if (quant_.zeros != WeightZero::kOffset || !known_.has_zeros) {
      refuse_known(".zero_values", "given", "ScaleValues::kFloat but for WeightZero::kOffset");
    }
  }

  void check_steps() const {
    const QuantSpec own = quant_of_matrix(quant_, known_);
    const bool in_steps =
        own.scale_values == ScaleValues::kSteps || own.zero_values == ScaleValues::kSteps;
    if (!in_steps || fit_steps(own)) return;
    refuse_known("", "ScaleValues::kSteps", steps_limit());
  }

  const MoeSpec& spec_;
  const QuantSpec& quant_;
  const char* field_;
  const MatrixCodes& known_;
};

}  // namespace

void check_quant(const MoeSpec& spec) {
  check_types(spec);
  const QuantSpec& quant = spec.quant;
  check_choice("quant.weights", quant.weights, WeightScale::kBlock);
  check_choice("quant.activations", quant.activations, ActivationScale::kGroup);
  check_choice("quant.activation_scale_rule", quant.activation_scale_rule, RowScaleRule::kTwoLevel);
  check_choice("quant.scale_values", quant.scale_values, ScaleValues::kFloat8);
  check_choice("quant.zeros", quant.zeros, WeightZero::kOffset);
  check_choice("quant.zero_values", quant.zero_values, ScaleValues::kSteps);
  const bool quantised = !is_plain(spec.weight_dtype);
  const std::string type(to_string(spec.weight_dtype));
  if (quantised != (quant.weights != WeightScale::kNone)) {
    refuse("quant.weights", quantised ? "WeightScale::kNone" : "scales",
           quantised ? "WeightScale::kTensor, WeightScale::kChannel or WeightScale::kBlock: " +
                           type + " weights have scales"
                     : "WeightScale::kNone for weights of " + type);
  }
  if (!quantised && quant.activations != ActivationScale::kNone) {
    refuse("quant.activations", "a scale", "ActivationScale::kNone for weights of " + type);
  }
  if (quantised) {
    const Support takes = format_of(spec.weight_dtype).takes(quant);
    if (!takes) refuse("quant", "weights of " + type, takes.reason());
  }
  const bool in_blocks = quant.weights == WeightScale::kBlock;
  check_block("quant.block_rows", quant.block_rows, in_blocks);
  check_block("quant.block_cols", quant.block_cols, in_blocks);
  check_group(quant);
  check_scale_rule(spec);
  check_row_type(spec);
  const bool dynamic =
      quant.activations == ActivationScale::kToken || quant.activations == ActivationScale::kGroup;
  if (quant.power_of_two_scales && !dynamic) {
    refuse("quant.power_of_two_scales", "true", "false but for scales made of each row");
  }
  const auto refuse_plain = [&](const char* field, bool given) {
    if (given && !quantised) refuse(field, "given", "absent for weights of " + type);
  };
  refuse_plain("quant.signed_scales", quant.signed_scales);
  refuse_plain("quant.scale_values", quant.scale_values != ScaleValues::kFloat);
  refuse_plain("quant.zeros", quant.zeros != WeightZero::kNone);
  refuse_plain("quant.has_global_scale", quant.has_global_scale);
  refuse_plain("quant.has_column_order", quant.has_column_order);
  refuse_plain("quant.has_column_factors", quant.has_column_factors);
  const bool plain_rows = quant.activations == ActivationScale::kNone;
  if (quant.has_column_order && !(in_blocks && quant.block_rows == 1 && plain_rows)) {
    refuse("quant.has_column_order", "true",
           "false but for WeightScale::kBlock with block_rows 1 and ActivationScale::kNone");
  }
  if (quant.zero_values != ScaleValues::kFloat && quant.zeros != WeightZero::kOffset) {
    refuse("quant.zero_values", "given", "ScaleValues::kFloat but for WeightZero::kOffset");
  }
  const bool in_steps =
      quant.scale_values == ScaleValues::kSteps || quant.zero_values == ScaleValues::kSteps;
  if (in_steps && !fit_steps(quant)) {
    refuse("quant.scale_values", "ScaleValues::kSteps", steps_limit());
  }
  KnownCheck(spec, "gate_up_codes", quant.gate_up_codes).run();
  KnownCheck(spec, "down_codes", quant.down_codes).run();
  // Offsets are multiplied with sums of rows' codes, which are exact for whole numbers only.
  if (quant.zeros != WeightZero::kNone && !plain_rows &&
      !activation_rule(spec.weight_dtype, quant).is_exact()) {
    refuse("quant.zeros", "given",
           "absent but for ActivationScale::kNone and rows of I8 beside weights of whole numbers");
  }
}

}  // namespace conclave::inline v0::quant
