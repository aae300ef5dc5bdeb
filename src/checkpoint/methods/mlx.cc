// Files of MLX: codes in words, w = code * scale + bias for groups of columns. Their configuration
// names no method.
#include "checkpoint/methods/config.h"
#include "checkpoint/methods/methods.h"
#include "checkpoint/methods/module_rules.h"
#include "checkpoint/methods/shared_planes.h"
#include "checkpoint/methods/words.h"
#include "core/checked.h"
#include "io/text.h"
#include "quant/weight_format.h"

#include "conclave/error.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kScales = ".scales";
constexpr std::string_view kBiases = ".biases";
constexpr std::array kScalesOnly = {kScales};
constexpr std::array kScalesAndBiases = {kScales, kBiases};

int64_t bits_of(const MatrixForm& form) { return form.quant->stored.bits; }

StoredShapes code_shapes(const MatrixForm& form) {
  return {{form.rows, ceil_div(form.cols * bits_of(form), kWordBits)}};
}
bool fills_words(const MatrixForm& form) {
  return bits_of(form) == integer_bits(bits_of(form)) && form.cols * bits_of(form) % kWordBits == 0;
}
bool has_words(const TensorInfo& tensor) { return tensor.dtype == DType::kU32; }

void decode_codes(const MatrixForm& form, std::span<const PlaneInput> inputs,
                  std::span<std::byte> plane) {
  const int64_t bits = bits_of(form);
  const int64_t words = ceil_div(form.cols * bits, kWordBits);
  for (int64_t row = 0; row < form.rows; ++row) {
    const auto word = [&](int64_t i) { return word_at(inputs[0].bytes, row * words + i); };
    for (int64_t col = 0; col < form.cols; ++col) {
      set_integer(plane.data(), row * form.cols + col, bits, code_in_line(word, col, bits));
    }
  }
}

void encode_codes(const MatrixForm& form, const MatrixPlanes& planes, std::span<std::byte> tensor) {
  const int64_t bits = bits_of(form);
  if (fills_words(form)) {
    std::memcpy(tensor.data(), planes.codes.data(), tensor.size());
    if (bits == 8) flip_signs(tensor);
    return;
  }
  const int64_t words = ceil_div(form.cols * bits, kWordBits);
  const int64_t row_bytes = ceil_div(form.cols * integer_bits(bits), 8);
  for (int64_t row = 0; row < form.rows; ++row) {
    const std::byte* const codes = planes.codes.data() + row * row_bytes;
    for (int64_t col = 0; col < form.cols; ++col) {
      put_in_line(tensor, row * words, 1, col, bits, stored_integer(codes, col, bits));
    }
  }
}

// Canonical codes are less by the middle one, and what is taken from products is the bias with
// another sign.
void decode_biases(const MatrixForm& form, std::span<const PlaneInput> inputs,
                   std::span<std::byte> plane) {
  check_input(inputs[1], kFloatTypes, scales_as_read(form));
  const auto middle = static_cast<float>(middle_of(bits_of(form)));
  for (int64_t i = 0; i < form.scale_rows * form.groups; ++i) {
    set_float(plane, i, -(float_at(inputs[0], i) + middle * float_at(inputs[1], i)));
  }
}

// The weight of the code 0, in the type of the scales.
void encode_biases(const MatrixForm& form, const MatrixPlanes& planes,
                   std::span<std::byte> tensor) {
  TensorInfo info;
  info.dtype = planes.scale_dtype;
  const PlaneInput scales{.info = &info, .bytes = planes.scales};
  const auto middle = static_cast<float>(middle_of(bits_of(form)));
  const quant::WeightFormat& format = quant::format_of(planes.scale_dtype);
  for (int64_t i = 0; i < form.scale_rows * form.groups; ++i) {
    const float bias = -(value_at<float>(planes.zeros, i) + middle * float_at(scales, i));
    format.encode(&bias, i, 1, tensor.data());
  }
}

// Matrices that layers have as values only, such as routers, may have groups and bits of their own,
// which their sizes tell.
StoredShapes value_shapes(const MatrixForm& form) {
  StoredShapes shapes;
  for (const int64_t bits : {2, 3, 4, 5, 6, 8}) {
    shapes.push_back({form.rows, ceil_div(form.cols * bits, kWordBits)});
  }
  return shapes;
}

void decode_values(const MatrixForm& form, std::span<const PlaneInput> inputs,
                   std::span<std::byte> plane) {
  const int64_t words = inputs[0].info->shape.back();
  const int64_t bits = words * kWordBits / form.cols;
  StoredShapes groups;
  for (const int64_t width : {16, 32, 64, 128}) {
    groups.push_back({form.rows, ceil_div(form.cols, width)});
  }
  check_input(inputs[1], kFloatTypes, groups);
  check_input(inputs[2], kFloatTypes, {inputs[1].info->shape});
  const int64_t row_groups = inputs[1].info->shape.back();
  const int64_t width = ceil_div(form.cols, row_groups);
  for (int64_t row = 0; row < form.rows; ++row) {
    const auto word = [&](int64_t i) { return word_at(inputs[0].bytes, row * words + i); };
    for (int64_t col = 0; col < form.cols; ++col) {
      const auto code = static_cast<float>(code_in_line(word, col, bits));
      const int64_t at = row * row_groups + col / width;
      set_float(plane, row * form.cols + col,
                code * float_at(inputs[1], at) + float_at(inputs[2], at));
    }
  }
}

constexpr std::array kMlxWords = {DType::kU32, DType::kI32};
constexpr StoredPlane kCodes = {.suffix = ".weight",
                                .types = kMlxWords,
                                .shapes = code_shapes,
                                .has_codes = has_words,
                                .decode = decode_codes,
                                .lies_in_place = fills_words,
                                .encode = encode_codes,
                                .value_shapes = value_shapes,
                                .decode_values = decode_values,
                                .value_inputs = kScalesAndBiases};
constexpr StoredPlane with_signs_flipped(StoredPlane codes) {
  codes.convert = flip_signs;
  return codes;
}
constexpr std::array<StoredPlane, 3> planes_with(const StoredPlane& codes) {
  return {codes,
          StoredPlane{.suffix = kScales,
                      .plane = WeightPlane::kScale,
                      .types = kFloatTypes,
                      .shapes = scales_as_read},
          StoredPlane{.suffix = kBiases,
                      .plane = WeightPlane::kZero,
                      .types = kFloatTypes,
                      .shapes = scales_as_read,
                      .type = DType::kF32,
                      .decode = decode_biases,
                      .inputs = kScalesOnly,
                      .encode = encode_biases,
                      .has_scale_type = true}};
}
constexpr std::array kPlanes = planes_with(kCodes);
constexpr std::array kPlanesOfBytes = planes_with(with_signs_flipped(kCodes));

QuantizedWeights weights_of(int64_t bits, const io::JsonValue& group) {
  if ((bits < 2 || bits > 6) && bits != 8) throw NotRead{fmt::format("codes of {} bits", bits)};
  QuantizedWeights weights{.element = integer_type(bits), .stored = {.bits = bits}};
  if (bits == 5 || bits == 6) {
    weights.spec.gate_up_codes.dtype = weights.spec.down_codes.dtype = DType::kI6;
  }
  weights.planes = bits == 8 ? kPlanesOfBytes : kPlanes;
  set_block(weights.spec, 1, block_size(group));
  weights.whole_groups = key_of(group);
  weights.spec.zeros = WeightZero::kOffset;
  weights.spec.signed_scales = true;
  return weights;
}

void check_mode(const io::JsonValue& config) {
  const std::string mode = text_of(config, "mode", "affine");
  if (mode != "affine") throw NotRead{"the mode " + io::show_name(mode)};
}

// A module may have settings of its own. Routers are read as values, whatever theirs are.
bool is_of_experts(std::string_view name) {
  const bool is_expert = name.find("switch_mlp") != std::string_view::npos ||
                         name.find("expert") != std::string_view::npos;
  return is_expert && !name.ends_with("gate");
}

ModuleScheme read_module(const io::JsonValue& module, int64_t bits, const io::JsonValue& group) {
  const auto own_bits = module.find_set("bits");
  const auto own_group = module.find_set("group_size");
  try {
    check_mode(module);
    return {.weights =
                weights_of(own_bits ? own_bits->as_int64() : bits, own_group ? *own_group : group),
            .reason = {}};
  } catch (const NotRead& refusal) {
    return {.weights = {}, .reason = refusal.reason};
  }
}

}  // namespace

bool wrote_mlx(const io::JsonValue& config) {
  if (!config.is_object() || !config.find_set("bits") || !config.find_set("group_size")) {
    return false;
  }
  // Settings of other methods, whose files may be older than the key quant_method.
  return !config.find("sym") && !config.find("desc_act") && !config.find("zero_point");
}

QuantizedWeights read_mlx(const io::JsonValue& config) {
  check_mode(config);
  const int64_t bits = config.at("bits").as_int64();
  const io::JsonValue group = config.at("group_size");
  ModuleSchemes found;
  found.schemes.push_back({.weights = weights_of(bits, group), .reason = {}});
  for (const io::JsonMember& module : config.members()) {
    if (module.value.is_bool() && !module.value.as_bool()) found.left_out.emplace(module.key);
    if (!module.value.is_object() || !is_of_experts(module.key)) continue;
    found.by_name.emplace(module.key, found.schemes.size());
    found.schemes.push_back(read_module(module.value, bits, group));
  }
  found.rules.push_back({.scheme = 0});
  return of_modules(std::move(found));
}

// Modules that stay as they are have no settings.
std::string write_mlx(const MethodForm& form, const std::vector<std::string>& kept) {
  nlohmann::ordered_json config = {
      {"group_size", form.quant.block_cols}, {"bits", form.code_bits}, {"mode", "affine"}};
  for (const std::string& module : kept) config[module] = false;
  return config.dump();
}

}  // namespace conclave::inline v0::checkpoint
