// Quark's integer codes.
#include "checkpoint/methods/quark_integers.h"

#include "checkpoint/methods/config.h"
#include "checkpoint/methods/inputs.h"
#include "checkpoint/methods/shared_planes.h"
#include "checkpoint/methods/words.h"
#include "core/checked.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

// How integers are packed. Those of 4 bits lie in words of 32, in an order of their own or not;
// those of 8 in bytes. Lines are columns where groups of columns share scales, else rows.
struct Packing {
  int64_t bits = 4;
  bool reordered = true;
  bool has_signs = true;
  bool has_zeros = false;
  bool by_columns = true;

  constexpr size_t index() const {
    return size_t{bits == 8} | size_t{reordered} << 1 | size_t{has_signs} << 2 |
           size_t{has_zeros} << 3 | size_t{by_columns} << 4;
  }
};
constexpr size_t kPackings = 32;
constexpr Packing packing_at(size_t index) {
  return {.bits = (index & 1) != 0 ? 8 : 4,
          .reordered = (index & 2) != 0,
          .has_signs = (index & 4) != 0,
          .has_zeros = (index & 8) != 0,
          .by_columns = (index & 16) != 0};
}

constexpr std::array<int64_t, 8> kPlaces = {0, 4, 1, 5, 2, 6, 3, 7};
constexpr std::string_view kZeros = "_zero_point";
constexpr std::array kAids = {kZeros};

template <Packing kPacking>
constexpr int64_t kCodesInUnit = kPacking.bits == 8 ? 1 : kWordBits / 4;

template <Packing kPacking>
constexpr std::span<const DType> stored_types() {
  if constexpr (kPacking.bits == 4) return kWordTypes;
  if constexpr (kPacking.has_signs) return kSignedByteTypes;
  return kByteTypes;
}
template <Packing kPacking>
bool has_codes(const TensorInfo& tensor) {
  return tensor.dtype == stored_types<kPacking>().front();
}

template <Packing kPacking>
StoredShapes code_shapes(const MatrixForm& form) {
  if (kPacking.by_columns) return {{form.cols, ceil_div(form.rows, kCodesInUnit<kPacking>)}};
  return {{form.rows, ceil_div(form.cols, kCodesInUnit<kPacking>)}};
}
template <Packing kPacking>
StoredShapes scale_shapes(const MatrixForm& form) {
  if (kPacking.by_columns) return {{form.groups, form.scale_rows}};
  if (form.scale_rows == 1) return single(form);
  return {{form.scale_rows, 1}, {form.scale_rows}};
}
template <Packing kPacking>
StoredShapes zero_shapes(const MatrixForm& form) {
  const int64_t units = ceil_div(form.scale_rows, kCodesInUnit<kPacking>);
  if (kPacking.by_columns) return {{form.groups, units}};
  if (form.scale_rows == 1) return {{1}, {}};
  return {{units}};
}

// A code of a line of so many, counted from 0.
template <Packing kPacking>
uint32_t code_of(std::span<const std::byte> units, int64_t line, int64_t length, int64_t nth) {
  const auto middle = static_cast<uint32_t>(middle_of(kPacking.bits));
  if constexpr (kPacking.bits == 8) {
    const uint32_t code = value_at<uint8_t>(units, line * length + nth);
    return kPacking.has_signs ? code ^ middle : code;
  } else {
    constexpr int64_t kCodes = kCodesInUnit<kPacking>;
    const int64_t at = nth % kCodes;
    const int64_t place = kPacking.reordered ? kPlaces[static_cast<size_t>(at)] : at;
    const uint32_t word = word_at(units, line * ceil_div(length, kCodes) + nth / kCodes);
    const uint32_t code = word >> (place * 4) & 0xfU;
    return kPacking.has_signs ? code ^ middle : code;
  }
}

// A zero point less the middle of codes. That of a whole matrix is a number by itself.
template <Packing kPacking>
int64_t zero_of(const MatrixForm& form, std::span<const std::byte> units, int64_t group,
                int64_t row) {
  if (kPacking.bits == 4 && form.quant->spec.weights == WeightScale::kTensor) {
    const int64_t zero = value_at<int32_t>(units, 0);
    return kPacking.has_signs ? zero : zero - middle_of(kPacking.bits);
  }
  const uint32_t code = code_of<kPacking>(units, group, form.scale_rows, row);
  return static_cast<int64_t>(code) - middle_of(kPacking.bits);
}

template <Packing kPacking>
void check_symmetric(const MatrixForm& form, const PlaneInput& zeros) {
  check_input(zeros, stored_types<kPacking>(), zero_shapes<kPacking>(form));
  for (int64_t i = 0; i < form.groups * form.scale_rows; ++i) {
    const int64_t zero =
        zero_of<kPacking>(form, zeros.bytes, i / form.scale_rows, i % form.scale_rows);
    if (zero != 0) reject_value(zeros, "a zero point of symmetric codes", 0, zero);
  }
}

template <Packing kPacking>
void decode_codes(const MatrixForm& form, std::span<const PlaneInput> inputs,
                  std::span<std::byte> plane) {
  if (inputs.size() > 1 && inputs[1].info != nullptr) check_symmetric<kPacking>(form, inputs[1]);
  for (int64_t row = 0; row < form.rows; ++row) {
    for (int64_t col = 0; col < form.cols; ++col) {
      const uint32_t code = kPacking.by_columns
                                ? code_of<kPacking>(inputs[0].bytes, col, form.rows, row)
                                : code_of<kPacking>(inputs[0].bytes, row, form.cols, col);
      set_integer(plane.data(), row * form.cols + col, kPacking.bits, code);
    }
  }
}

template <Packing kPacking>
void decode_zeros(const MatrixForm& form, std::span<const PlaneInput> inputs,
                  std::span<std::byte> plane) {
  for (int64_t row = 0; row < form.scale_rows; ++row) {
    for (int64_t group = 0; group < form.groups; ++group) {
      const int64_t zero = zero_of<kPacking>(form, inputs[0].bytes, group, row);
      set_float(plane, row * form.groups + group, static_cast<float>(zero));
    }
  }
}

void transpose_scales(const MatrixForm& form, std::span<const PlaneInput> inputs,
                      std::span<std::byte> plane) {
  transpose(inputs[0], form.groups, form.scale_rows, plane);
}

// The last is the step of rows, which is a plane where these are quantised by it.
template <Packing kPacking>
constexpr std::array kPlanes = {
    StoredPlane{.suffix = "",
                .ending = "",
                .types = stored_types<kPacking>(),
                .shapes = code_shapes<kPacking>,
                .has_codes = has_codes<kPacking>,
                .decode = decode_codes<kPacking>,
                .optional_inputs = std::span(kAids).first(kPacking.has_zeros ? 0 : 1)},
    StoredPlane{.suffix = "_scale",
                .ending = "",
                .plane = WeightPlane::kScale,
                .types = kFloatTypes,
                .shapes = scale_shapes<kPacking>,
                .decode = kPacking.by_columns ? transpose_scales : nullptr},
    StoredPlane{.suffix = kZeros,
                .ending = "",
                .use = kPacking.has_zeros ? StoredPlane::Use::kPlane : StoredPlane::Use::kInput,
                .plane = WeightPlane::kZero,
                .types = stored_types<kPacking>(),
                .shapes = zero_shapes<kPacking>,
                .type = DType::kF32,
                .decode = decode_zeros<kPacking>},
    unused(".input_zero_point"), unused(".input_scale")};

template <size_t... kIndex>
constexpr auto lists_of(std::index_sequence<kIndex...>) {
  return std::array{std::span<const StoredPlane>(kPlanes<packing_at(kIndex)>)...};
}
constexpr auto kLists = lists_of(std::make_index_sequence<kPackings>());

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
  const Packing packing{.bits = codes.bits,
                        .reordered = pack == "reorder",
                        .has_signs = codes.has_signs,
                        .has_zeros = has_zeros,
                        .by_columns = text_of(weight, "qscheme", "") == "per_group"};
  weights.planes = kLists[packing.index()];
  return weights;
}

}  // namespace conclave::inline v0::checkpoint
