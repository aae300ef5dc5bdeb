// Files of MLX: codes in words, w = code * scale + bias for groups of columns. Their configuration
// names no method.
#include "checkpoint/methods/config.h"
#include "checkpoint/methods/methods.h"
#include "checkpoint/methods/shared_planes.h"
#include "checkpoint/methods/words.h"
#include "core/checked.h"
#include "io/text.h"

#include "conclave/error.h"

#include <fmt/format.h>

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

constexpr StoredPlane kCodes = {.suffix = ".weight",
                                .types = kWordTypes,
                                .shapes = code_shapes,
                                .has_codes = has_words,
                                .decode = decode_codes,
                                .lies_in_place = fills_words,
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
                      .inputs = kScalesOnly}};
}
constexpr std::array kPlanes = planes_with(kCodes);
constexpr std::array kPlanesOfBytes = planes_with(with_signs_flipped(kCodes));

// Modules may have settings of their own, or none; those of experts would need a spec of theirs.
void check_overrides(const io::JsonValue& config, int64_t bits, int64_t group) {
  for (const io::JsonMember& module : config.members()) {
    if (!module.value.is_object()) continue;
    const std::string_view name = module.key;
    const bool is_expert = name.find("switch_mlp") != std::string_view::npos ||
                           name.find("expert") != std::string_view::npos;
    if (!is_expert || name.ends_with("gate")) continue;
    const auto other = [&](const char* key, int64_t usual) {
      const auto value = module.value.find_set(key);
      return value && value->as_int64() != usual;
    };
    if (other("bits", bits) || other("group_size", group)) {
      throw NotRead{"experts with settings of their own: " + io::show_name(name)};
    }
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
  const std::string mode = text_of(config, "mode", "affine");
  if (mode != "affine") throw NotRead{"the mode " + io::show_name(mode)};
  const int64_t bits = config.at("bits").as_int64();
  if ((bits < 2 || bits > 6) && bits != 8) throw NotRead{fmt::format("codes of {} bits", bits)};
  QuantizedWeights weights{.element = integer_type(bits), .stored = {.bits = bits}};
  weights.planes = bits == 8 ? kPlanesOfBytes : kPlanes;
  const int64_t group = block_size(config.at("group_size"));
  check_overrides(config, bits, group);
  set_block(weights.spec, 1, group);
  weights.spec.zeros = WeightZero::kOffset;
  weights.spec.signed_scales = true;
  return weights;
}

}  // namespace conclave::inline v0::checkpoint
