#include "core/weight_types.h"
#include "quant/activation_rows.h"
#include "quant/check_spec.h"
#include "quant/weight_format.h"

#include "conclave/error.h"

#include <string>

namespace conclave::inline v0 {
namespace {

// As many columns as rows of llama.cpp's Q8_0 have to a scale.
constexpr int64_t kGroupColumns = 32;

[[noreturn]] void refuse(const MoeSpec& spec, const char* limit) {
  throw Error(ErrorCode::kInvalidArgument, {.what = "rows cannot be int8 beside these weights",
                                            .tensor = "MoeSpec.weight_dtype",
                                            .found = std::string(to_string(spec.weight_dtype)),
                                            .limit = limit});
}

}  // namespace

MoeSpec with_int8_rows(const MoeSpec& spec) {
  MoeSpec coded = spec;
  if (is_plain(spec.weight_dtype)) refuse(spec, "codes with scales");
  if (!quant::takes_int8_rows(spec.weight_dtype)) {
    refuse(spec, "codes whose values are whole numbers of a unit: I8, I4 or F4");
  }
  if (spec.quant.activations != ActivationScale::kNone) {
    refuse(spec, "weights whose rows are not quantised by the spec");
  }
  coded.quant.activations = ActivationScale::kGroup;
  coded.quant.activation_group = kGroupColumns;
  coded.quant.activation_dtype = DType::kI8;
  quant::check_quant(coded);
  return coded;
}

MoeSpec with_plain_rows(const MoeSpec& spec) {
  MoeSpec plain = spec;
  const QuantSpec usual;
  plain.quant.activations = usual.activations;
  plain.quant.activation_group = usual.activation_group;
  plain.quant.activation_dtype = usual.activation_dtype;
  plain.quant.activation_scale_rule = usual.activation_scale_rule;
  plain.quant.power_of_two_scales = usual.power_of_two_scales;
  return plain;
}

}  // namespace conclave::inline v0
