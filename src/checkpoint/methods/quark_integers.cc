// Quark's integer codes.
#include "checkpoint/methods/quark_integers.h"

#include "checkpoint/methods/config.h"
#include "checkpoint/methods/inputs.h"
#include "checkpoint/methods/words.h"
#include "core/checked.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0::checkpoint {
namespace {

// Integers of 4 bits lie in words along the rows, in an order of their own or not, and so do zero
// points. Codes may have signs.
constexpr int64_t kCodesInAWord = 8;
constexpr std::array<int64_t, kCodesInAWord> kPlaces = {0, 4, 1, 5, 2, 6, 3, 7};
constexpr std::string_view kZeros = "_zero_point";
constexpr std::array kAids = {kZeros};

bool has_words(const TensorInfo& tensor) { return tensor.dtype == DType::kI32; }
StoredShapes code_shapes(const MatrixForm& form) {
  return {{form.cols, ceil_div(form.rows, kCodesInAWord)}};
}
StoredShapes zero_shapes(const MatrixForm& form) {
  return {{form.groups, ceil_div(form.rows, kCodesInAWord)}};
}

struct Packing {
  bool reordered = true;
  bool has_signs = true;
};

// The code of a row in a line of words, counted from 0.
template <Packing kPacking>
uint32_t code_in_words(const MatrixForm& form, std::span<const std::byte> words, int64_t line,
                       int64_t row) {
  const int64_t nth = row % kCodesInAWord;
  const int64_t place = kPacking.reordered ? kPlaces[static_cast<size_t>(nth)] : nth;
  const int64_t line_words = ceil_div(form.rows, kCodesInAWord);
  const uint32_t word = word_at(words, line * line_words + row / kCodesInAWord);
  const uint32_t code = word >> (place * 4) & 0xfU;
  return kPacking.has_signs ? code ^ 8U : code;
}

template <Packing kPacking>
void decode_codes(const MatrixForm& form, std::span<const PlaneInput> inputs,
                  std::span<std::byte> plane) {
  if (inputs.size() > 1 && inputs[1].info != nullptr) {
    check_input(inputs[1], kWordTypes, zero_shapes(form));
    for (int64_t i = 0; i < form.groups * form.rows; ++i) {
      const int64_t zero =
          code_in_words<kPacking>(form, inputs[1].bytes, i / form.rows, i % form.rows);
      if (zero == middle_of(4)) continue;
      reject_value(inputs[1], "a zero point of symmetric codes", 0, zero - middle_of(4));
    }
  }
  for (int64_t row = 0; row < form.rows; ++row) {
    for (int64_t col = 0; col < form.cols; ++col) {
      const uint32_t code = code_in_words<kPacking>(form, inputs[0].bytes, col, row);
      set_integer(plane.data(), row * form.cols + col, 4, code);
    }
  }
}

template <Packing kPacking>
void decode_zeros(const MatrixForm& form, std::span<const PlaneInput> inputs,
                  std::span<std::byte> plane) {
  for (int64_t row = 0; row < form.rows; ++row) {
    for (int64_t group = 0; group < form.groups; ++group) {
      const int64_t zero = code_in_words<kPacking>(form, inputs[0].bytes, group, row);
      set_float(plane, row * form.groups + group, static_cast<float>(zero - middle_of(4)));
    }
  }
}

StoredShapes transposed_scale_shapes(const MatrixForm& form) {
  return {{form.groups, form.scale_rows}};
}
void transpose_scales(const MatrixForm& form, std::span<const PlaneInput> inputs,
                      std::span<std::byte> plane) {
  transpose(inputs[0], form.groups, form.scale_rows, plane);
}

template <Packing kPacking, bool kHasZeros>
constexpr std::array kPlanes = {
    StoredPlane{.suffix = "",
                .ending = "",
                .types = kWordTypes,
                .shapes = code_shapes,
                .has_codes = has_words,
                .decode = decode_codes<kPacking>,
                .optional_inputs = std::span(kAids).first(kHasZeros ? 0 : 1)},
    StoredPlane{.suffix = "_scale",
                .ending = "",
                .plane = WeightPlane::kScale,
                .types = kFloatTypes,
                .shapes = transposed_scale_shapes,
                .decode = transpose_scales},
    StoredPlane{.suffix = kZeros,
                .ending = "",
                .use = kHasZeros ? StoredPlane::Use::kPlane : StoredPlane::Use::kInput,
                .plane = WeightPlane::kZero,
                .types = kWordTypes,
                .shapes = zero_shapes,
                .type = DType::kF32,
                .decode = decode_zeros<kPacking>}};

template <Packing kPacking>
std::span<const StoredPlane> planes_of(bool has_zeros) {
  if (has_zeros) return kPlanes<kPacking, true>;
  return kPlanes<kPacking, false>;
}

}  // namespace

QuantizedWeights read_quark_integers(const io::JsonValue& config, const io::JsonValue& weight,
                                     const QuantSpec& spec, QuarkIntegers codes) {
  QuantizedWeights weights{
      .element = integer_type(codes.bits), .spec = spec, .stored = {.bits = codes.bits}};
  const bool has_zeros = !flag_of(weight, "symmetric", true);
  if (has_zeros && spec.weights == WeightScale::kTensor) {
    throw NotRead{"one zero point for a whole matrix"};
  }
  if (has_zeros) weights.spec.zeros = WeightZero::kPoint;
  const auto exported = config.find_set("export");
  const std::string pack = exported ? text_of(*exported, "pack_method", "reorder") : "reorder";
  const bool reordered = pack == "reorder";
  if (codes.has_signs) {
    weights.planes = reordered ? planes_of<Packing{true, true}>(has_zeros)
                               : planes_of<Packing{false, true}>(has_zeros);
  } else {
    weights.planes = reordered ? planes_of<Packing{true, false}>(has_zeros)
                               : planes_of<Packing{false, false}>(has_zeros);
  }
  return weights;
}

}  // namespace conclave::inline v0::checkpoint
