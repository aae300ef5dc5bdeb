// ModelOpt, of config.json or of hf_quant_config.json: an algorithm for all modules, or for each.
#include "checkpoint/methods/config.h"
#include "checkpoint/methods/methods.h"
#include "checkpoint/methods/module_rules.h"
#include "checkpoint/methods/shared_planes.h"
#include "core/checked.h"
#include "core/code_bits.h"
#include "core/float8.h"
#include "io/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr int64_t kNvfp4Group = 16;
constexpr int64_t kMxGroup = 32;
constexpr int64_t kAwqGroup = 128;

// Codes of e2m1 under the names of plain matrices, scales of scales, and steps of rows, which are
// not needed where rows stay as they are.
constexpr std::array kNvfp4 = {pairs_of_codes("", ""), global_scale("_scale_2", ""),
                               global_scale("_weight_scale_2", "")};
constexpr std::array kNvfp4Alone = {
    pairs_of_codes("", ""), global_scale("_scale_2", ""), global_scale("_weight_scale_2", ""),
    unused(".input_scale"), unused("_input_scale", ""),
};
constexpr std::array kMxfp4 = {pairs_of_codes("", ""), exponents("_scale", ""),
                               exponents("_weight_scale", "")};
constexpr std::array kMxfp8 = {exponents("_scale", ""), exponents("_weight_scale", "")};

// Signed codes of half a byte; a byte has those of two rows, that of the even one in its lower
// half.
StoredShapes row_pair_shapes(const MatrixForm& form) {
  return {{ceil_div(form.rows, 2), form.cols}};
}

// Calls take(index, code) for each code of the matrix, which is -8 to 7.
template <class Take>
void for_each_code(const MatrixForm& form, std::span<const std::byte> stored, const Take& take) {
  for (int64_t row = 0; row < form.rows; ++row) {
    const std::byte* const line = stored.data() + row / 2 * form.cols;
    for (int64_t col = 0; col < form.cols; ++col) {
      const int pair = std::to_integer<int>(line[col]);
      const int code = row % 2 == 0 ? pair & 0xf : pair >> 4;
      take(row * form.cols + col, code < 8 ? code : code - 16);
    }
  }
}

void decode_row_pairs(const MatrixForm& form, std::span<const PlaneInput> inputs,
                      std::span<std::byte> plane) {
  for_each_code(form, inputs[0].bytes, [&](int64_t index, int code) {
    set_code(plane.data(), index, 4, static_cast<uint8_t>(code + 8));
  });
}

// Rows in e4m3 stand beside codes of e4m3, which have all values of four bits.
void decode_row_pairs_as_e4m3(const MatrixForm& form, std::span<const PlaneInput> inputs,
                              std::span<std::byte> plane) {
  for_each_code(form, inputs[0].bytes, [&](int64_t index, int code) {
    plane[static_cast<size_t>(index)] =
        static_cast<std::byte>(float_to_e4m3(static_cast<float>(code)));
  });
}

using Decode = decltype(StoredPlane::decode);
constexpr StoredPlane row_pairs(Decode decode) {
  return {.suffix = "",
          .ending = "",
          .types = kPairTypes,
          .shapes = row_pair_shapes,
          .has_codes = has_pairs,
          .decode = decode};
}

// Rows are multiplied by these factors before they are quantised, or multiplied.
constexpr StoredPlane row_factors(std::string_view suffix, std::string_view ending) {
  return {.suffix = suffix,
          .ending = ending,
          .plane = WeightPlane::kColumnFactor,
          .types = kFloatTypes,
          .shapes = columns};
}

constexpr std::array kAwq = {row_pairs(decode_row_pairs),
                             row_factors(".pre_quant_scale", ".weight"),
                             row_factors("_pre_quant_scale", "")};
// Rows are multiplied with codes that were rounded to e4m3 by the second scale: it cancels out.
constexpr std::array kAwqWithRows = {
    row_pairs(decode_row_pairs_as_e4m3), row_factors(".pre_quant_scale", ".weight"),
    row_factors("_pre_quant_scale", ""), unused("_scale_2", ""), unused("_weight_scale_2", "")};
constexpr std::array kNvfp4Awq = {
    pairs_of_codes("", ""), global_scale("_scale_2", ""), global_scale("_weight_scale_2", ""),
    row_factors(".pre_quant_scale", ".weight"), row_factors("_pre_quant_scale", "")};

// Stated by itself, or in the first of the groups of modules, which are alike.
std::optional<io::JsonValue> stated_group(const io::JsonValue& config) {
  if (const auto size = config.find_set("group_size")) return size;
  const auto groups = config.find_set("config_groups");
  if (!groups) return std::nullopt;
  for (const io::JsonMember& group : groups->members()) {
    const auto weights = group.value.find_set("weights");
    const auto size = weights ? weights->find_set("group_size") : weights;
    if (size) return size;
  }
  return std::nullopt;
}
int64_t group_size(const io::JsonValue& config, int64_t otherwise) {
  const auto size = stated_group(config);
  return size ? block_size(*size) : otherwise;
}

QuantizedWeights awq(const io::JsonValue& config) {
  QuantizedWeights weights{.element = DType::kI4, .planes = kAwq};
  set_block(weights.spec, 1, group_size(config, kAwqGroup));
  if (const auto size = stated_group(config)) weights.whole_groups = key_of(*size);
  weights.spec.has_column_factors = true;
  return weights;
}

QuantizedWeights awq_with_rows(const io::JsonValue& config) {
  QuantizedWeights weights = awq(config);
  weights.element = DType::kF8E4M3;
  weights.planes = kAwqWithRows;
  weights.spec.activations = ActivationScale::kTensorStatic;
  return weights;
}

QuantizedWeights nvfp4_alone(const io::JsonValue& config) {
  QuantizedWeights weights{.element = DType::kF4, .planes = kNvfp4Alone};
  set_block(weights.spec, 1, group_size(config, kNvfp4Group));
  weights.spec.has_global_scale = true;
  return weights;
}

QuantizedWeights nvfp4(const io::JsonValue& config) {
  QuantizedWeights weights = nvfp4_alone(config);
  weights.planes = kNvfp4;
  set_scaled_rows(DType::kF4, weights.spec.block_cols, RowScaleRule::kTwoLevel, weights);
  return weights;
}

// The step of rows is a calibrated one, as beside weights of e4m3.
QuantizedWeights with_e4m3_rows(QuantizedWeights weights, std::span<const StoredPlane> planes) {
  weights.planes = planes;
  weights.spec.activations = ActivationScale::kTensorStatic;
  return weights;
}

QuantizedWeights in_mx_groups(DType element, std::span<const StoredPlane> planes) {
  QuantizedWeights weights{.element = element, .planes = planes};
  set_block(weights.spec, 1, kMxGroup);
  return weights;
}

// The exponents of scales are rounded up, those of weights and of rows.
QuantizedWeights mxfp8() {
  QuantizedWeights weights = in_mx_groups(DType::kF8E4M3, kMxfp8);
  set_dynamic_rows(weights.spec);
  weights.spec.power_of_two_scales = true;
  return weights;
}

QuantizedWeights read_algorithm(const std::string& algorithm, const io::JsonValue& config) {
  if (algorithm == "FP8") {
    return usual_codes(DType::kF8E4M3, {.weights = WeightScale::kTensor,
                                        .activations = ActivationScale::kTensorStatic});
  }
  if (algorithm == "FP8_PER_CHANNEL_PER_TOKEN") {
    return usual_codes(DType::kF8E4M3,
                       {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken});
  }
  if (algorithm == "FP8_PB_WO")
    return usual_codes(DType::kF8E4M3, {.weights = WeightScale::kBlock});
  if (algorithm == "W4A16_NVFP4") return nvfp4_alone(config);
  if (algorithm == "NVFP4") return nvfp4(config);
  if (algorithm == "W4A8_NVFP4_FP8") return with_e4m3_rows(nvfp4_alone(config), kNvfp4);
  if (algorithm == "W4A8_MXFP4_FP8")
    return with_e4m3_rows(in_mx_groups(DType::kF4, kMxfp4), kMxfp4);
  if (algorithm == "MXFP8") return mxfp8();
  if (algorithm == "W4A16_AWQ") return awq(config);
  if (algorithm == "W4A8_AWQ") return awq_with_rows(config);
  if (algorithm == "NVFP4_AWQ") {
    QuantizedWeights weights = nvfp4(config);
    weights.planes = kNvfp4Awq;
    weights.spec.has_column_factors = true;
    return weights;
  }
  throw NotRead{"the algorithm " + io::show_name(algorithm)};
}

ModuleScheme read_scheme(const std::string& algorithm, const io::JsonValue& config) {
  try {
    return {.weights = read_algorithm(algorithm, config), .reason = {}};
  } catch (const NotRead& refusal) {
    return {.weights = {}, .reason = refusal.reason};
  }
}

// Modules are listed one by one, or several by the begin of their names.
QuantizedWeights read_mixed(const io::JsonValue& config) {
  ModuleSchemes found;
  std::map<std::string, size_t> known;  // the algorithm and its group, to the scheme
  for (const io::JsonMember& layer : config.at("quantized_layers").members()) {
    const std::string algorithm = text_of(layer.value, "quant_algo", "");
    const auto key = fmt::format("{} {}", algorithm, group_size(layer.value, 0));
    const auto [scheme, is_new] = known.emplace(key, found.schemes.size());
    if (is_new) found.schemes.push_back(read_scheme(algorithm, layer.value));
    found.by_name.emplace(layer.key, scheme->second);
  }
  const bool has_experts = std::ranges::any_of(found.by_name, [](const auto& entry) {
    return entry.first.find(".experts") != std::string::npos;
  });
  if (!has_experts) throw NotRead{"no experts among quantized_layers"};
  return of_modules(std::move(found));
}

}  // namespace

QuantizedWeights read_modelopt(const io::JsonValue& config) {
  const auto nested = config.find_set("quantization");
  const io::JsonValue& stated = nested ? *nested : config;
  const auto algorithm = stated.find_set("quant_algo");
  if (!algorithm) throw NotRead{"no quant_algo"};
  if (algorithm->as_string() == "MIXED_PRECISION") return read_mixed(stated);
  return read_algorithm(std::string(algorithm->as_string()), stated);
}

}  // namespace conclave::inline v0::checkpoint
