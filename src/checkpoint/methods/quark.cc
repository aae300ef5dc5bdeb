// The method "quark": e2m1 and e4m3 codes, integers (quark_integers.h), and e2m3 and e3m2 codes of
// 6 bits, whose values are e4m3 codes as well.
#include "checkpoint/methods/config.h"
#include "checkpoint/methods/methods.h"
#include "checkpoint/methods/module_rules.h"
#include "checkpoint/methods/quark_integers.h"
#include "checkpoint/methods/shared_planes.h"
#include "core/checked.h"
#include "core/float8.h"
#include "io/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

// Four codes of 6 bits fill three bytes, the lowest bits first.
StoredShapes six_bit_shapes(const MatrixForm& form) {
  return {{form.rows, ceil_div(form.cols * 6, 8)}};
}

// The value of a code of 6 bits, of which `kMantissa` are the mantissa's.
template <int kMantissa>
float six_bit_value(uint32_t code) {
  constexpr int kBias = kMantissa == 3 ? 1 : 3;
  const uint32_t mantissa = code & ((1U << kMantissa) - 1);
  const int exponent = static_cast<int>((code & 0x1fU) >> kMantissa);
  const int unit = (exponent == 0 ? 1 : exponent) - kBias - kMantissa;
  const uint32_t whole = exponent == 0 ? mantissa : mantissa | 1U << kMantissa;
  const float value = std::ldexp(static_cast<float>(whole), unit);
  return (code & 0x20U) != 0 ? -value : value;
}

template <int kMantissa>
void decode_six_bits(const MatrixForm& form, std::span<const PlaneInput> inputs,
                     std::span<std::byte> plane) {
  std::array<std::byte, 64> codes{};
  for (uint32_t code = 0; code < 64; ++code) {
    codes[code] = static_cast<std::byte>(float_to_e4m3(six_bit_value<kMantissa>(code)));
  }
  const int64_t row_bytes = ceil_div(form.cols * 6, 8);
  for (int64_t row = 0; row < form.rows; ++row) {
    const auto byte = [&](int64_t i) {
      return uint32_t{value_at<uint8_t>(inputs[0].bytes, row * row_bytes + i)};
    };
    for (int64_t col = 0; col < form.cols; ++col) {
      const int64_t bit = col * 6;
      uint32_t code = byte(bit / 8) >> (bit % 8);
      if (bit % 8 > 2) code |= byte(bit / 8 + 1) << (8 - bit % 8);
      plane[static_cast<size_t>(row * form.cols + col)] = codes[code & 0x3fU];
    }
  }
}

bool has_bytes(const TensorInfo& tensor) { return tensor.dtype == DType::kU8; }

constexpr StoredPlane six_bits(decltype(StoredPlane::decode) decode) {
  return {.suffix = "",
          .ending = "",
          .types = kByteTypes,
          .shapes = six_bit_shapes,
          .has_codes = has_bytes,
          .decode = decode};
}

constexpr StoredPlane kInputScale = unused(".input_scale");
constexpr std::array kFp4 = {pairs_of_codes("", ""), exponents("_scale", ""), kInputScale};
constexpr std::array kE2m3 = {six_bits(decode_six_bits<3>), exponents("_scale", ""), kInputScale};
constexpr std::array kE3m2 = {six_bits(decode_six_bits<2>), exponents("_scale", ""), kInputScale};
constexpr std::array kMxfp8 = {exponents("_scale", ""), kInputScale};
constexpr std::array kPlain = {kInputScale};

void read_scales(const io::JsonValue& weight, QuantSpec& spec) {
  const std::string scheme = text_of(weight, "qscheme", "per_tensor");
  if (scheme == "per_group") {
    set_group(weight.at("group_size"), spec);
  } else if (scheme == "per_channel") {
    spec.weights = WeightScale::kChannel;
  } else if (scheme == "per_tensor") {
    spec.weights = WeightScale::kTensor;
  } else {
    throw NotRead{"scales of the scheme " + io::show_name(scheme)};
  }
}

bool has_exponents(const io::JsonValue& weight) {
  return text_of(weight, "scale_format", "float32") == "e8m0";
}

struct IntegerType {
  std::string_view name;
  QuarkIntegers codes;
};
constexpr std::array kIntegers = {IntegerType{"int4", {.bits = 4, .has_signs = true}},
                                  IntegerType{"uint4", {.bits = 4, .has_signs = false}},
                                  IntegerType{"int8", {.bits = 8, .has_signs = true}},
                                  IntegerType{"uint8", {.bits = 8, .has_signs = false}}};

const IntegerType* find_integer(std::string_view type) {
  const auto* const found = std::ranges::find(kIntegers, type, &IntegerType::name);
  return found == kIntegers.end() ? nullptr : found;
}

QuantizedWeights read_codes(const io::JsonValue& config, const io::JsonValue& weight,
                            const QuantSpec& spec) {
  const std::string type = text_of(weight, "dtype", "");
  if (type == "fp8_e4m3") {
    QuantizedWeights weights = usual_codes(DType::kF8E4M3, spec);
    weights.planes = has_exponents(weight) ? std::span<const StoredPlane>(kMxfp8) : kPlain;
    return weights;
  }
  if (type == "fp4" || type == "fp6_e2m3" || type == "fp6_e3m2") {
    if (!has_exponents(weight)) throw NotRead{type + " codes with scales that are no e8m0"};
    if (type == "fp4") return {.element = DType::kF4, .spec = spec, .planes = kFp4};
    QuantizedWeights weights = usual_codes(DType::kF8E4M3, spec);
    weights.planes = type == "fp6_e2m3" ? std::span<const StoredPlane>(kE2m3) : kE3m2;
    return weights;
  }
  if (const IntegerType* const integers = find_integer(type)) {
    return read_quark_integers(config, weight, spec, integers->codes);
  }
  throw NotRead{"codes of " + io::show_name(type)};
}

// Types of rows in groups of columns.
struct MxRows {
  std::string_view name;
  DType rows;
};
constexpr std::array kMxRows = {MxRows{"fp4", DType::kF4}, MxRows{"fp6_e2m3", DType::kF6E2M3},
                                MxRows{"fp6_e3m2", DType::kF6E3M2},
                                MxRows{"fp8_e4m3", DType::kF8E4M3},
                                MxRows{"fp8_e5m2", DType::kF8E5M2}};

// How amax becomes a power of two.
std::optional<RowScaleRule> rule_of(const io::JsonValue& rows) {
  const std::string mode = text_of(rows, "scale_calculation_mode", "even");
  if (mode == "even") return RowScaleRule::kEvenPower;
  if (mode == "floor") return RowScaleRule::kFloorPower;
  if (mode == "ceil") return RowScaleRule::kCeilPower;
  return std::nullopt;
}

// Rows whose scales are powers of two. False: they are quantised in another way.
bool read_mx_rows(const io::JsonValue& rows, QuantizedWeights& weights) {
  const std::string type = text_of(rows, "dtype", "");
  const auto* const known = std::ranges::find(kMxRows, type, &MxRows::name);
  const auto rule = rule_of(rows);
  const auto size = rows.find_set("group_size");
  const bool groups = text_of(rows, "qscheme", "per_tensor") == "per_group" && size &&
                      has_exponents(rows) && flag_of(rows, "is_dynamic", false);
  if (known == kMxRows.end() || !rule || !groups) return false;
  if (weights.spec.zeros != WeightZero::kNone) return false;
  set_scaled_rows(known->rows, block_size(*size), *rule, weights);
  return true;
}

// Rows with one step each, or one that is stated, are codes as layers have them beside such
// weights. False: they are quantised in another way.
bool read_whole_rows(const io::JsonValue& rows, const std::string& weight_type,
                     QuantizedWeights& weights) {
  const std::string type = text_of(rows, "dtype", "");
  const std::string scheme = text_of(rows, "qscheme", "per_tensor");
  const bool in_blocks = weights.spec.weights == WeightScale::kBlock;
  const bool of_floats = type == "fp8_e4m3" && weight_type == type && !in_blocks;
  const bool of_integers =
      type == "int8" && find_integer(weight_type) != nullptr && scheme != "per_group";
  if (!(of_floats || of_integers) || !flag_of(rows, "symmetric", true)) return false;
  if (flag_of(rows, "is_dynamic", false)) {
    weights.spec.activations = ActivationScale::kToken;
    return true;
  }
  if (scheme != "per_tensor") return false;
  weights.spec.activations = ActivationScale::kTensorStatic;
  weights.planes = weights.planes.first(weights.planes.size() - 1);  // the step is read
  return true;
}

// Rows that are quantised by a rule that layers have stay so; others are read as they are.
void read_rows(const io::JsonValue& global, QuantizedWeights& weights) {
  const auto rows = global.find_set("input_tensors");
  if (!rows) return;
  const std::string weight_type = text_of(global.at("weight"), "dtype", "");
  if (!read_whole_rows(*rows, weight_type, weights) && !read_mx_rows(*rows, weights)) {
    weights.note = kPlainRows;
  }
}

// One entry of the configuration: what it says of weights and of rows.
QuantizedWeights read_entry(const io::JsonValue& config, const io::JsonValue& entry) {
  const auto weight = entry.find_set("weight");
  if (!weight) throw NotRead{"activations only"};
  if (weight->is_array()) throw NotRead{"weights of several quantisations after each other"};
  QuantSpec spec;
  read_scales(*weight, spec);
  QuantizedWeights weights = read_codes(config, *weight, spec);
  read_rows(entry, weights);
  return weights;
}

// The entry of linear layers that no name has: that of their class, or of all modules. Other
// classes have no matrices of a MoE layer.
io::JsonValue entry_of_linear(const io::JsonValue& config) {
  const auto classes = config.find_set("layer_type_quant_config");
  const auto linear = classes && classes->is_object() ? classes->find_set("Linear") : classes;
  return linear && linear->is_object() ? *linear : config.at("global_quant_config");
}

ModuleScheme read_scheme(const io::JsonValue& config, const io::JsonValue& entry) {
  try {
    return {.weights = read_entry(config, entry), .reason = {}};
  } catch (const NotRead& refusal) {
    return {.weights = {}, .reason = refusal.reason};
  }
}

}  // namespace

// Modules may have entries of their own, by their class or by patterns of their names. A name
// without wildcards counts before patterns, of which the first that fits counts.
QuantizedWeights read_quark(const io::JsonValue& config) {
  const io::JsonValue usual = entry_of_linear(config);
  const auto layers = config.find_set("layer_quant_config");
  if (!layers || !layers->is_object() || layers->size() == 0) return read_entry(config, usual);
  ModuleSchemes found;
  found.schemes.push_back(read_scheme(config, usual));
  for (const io::JsonMember& layer : layers->members()) {
    if (!layer.value.is_object()) continue;
    found.rules.push_back({.kind = ModuleRule::Kind::kPattern,
                           .text = std::string(layer.key),
                           .scheme = found.schemes.size()});
    found.schemes.push_back(read_scheme(config, layer.value));
  }
  std::ranges::stable_partition(found.rules, [](const ModuleRule& rule) {
    return rule.text.find_first_of("*?[") == std::string::npos;
  });
  found.rules.push_back({.scheme = 0});
  return of_modules(std::move(found));
}

}  // namespace conclave::inline v0::checkpoint
