// The method "awq": codes of 4 bits. In its layout "gemm" words hold eight rows of the matrix in an
// order of their own; in "gemv" eight columns, and zero points and scales are padded.
#include "checkpoint/methods/config.h"
#include "checkpoint/methods/methods.h"
#include "checkpoint/methods/words.h"
#include "core/checked.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cctype>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr int64_t kBits = 4;
constexpr int64_t kCodesInAWord = kWordBits / kBits;
// The place in a word of each of its eight rows.
constexpr std::array<int64_t, kCodesInAWord> kPlaces = {0, 4, 1, 5, 2, 6, 3, 7};
constexpr std::string_view kZeros = ".qzeros";
constexpr std::array kAids = {kZeros};

uint32_t code_of(uint32_t word, int64_t place) { return word >> (place * kBits) & 0xf; }

// Layout "gemm".

int64_t words_of_rows(const MatrixForm& form) { return ceil_div(form.rows, kCodesInAWord); }

StoredShapes gemm_code_shapes(const MatrixForm& form) { return {{form.cols, words_of_rows(form)}}; }
StoredShapes gemm_zero_shapes(const MatrixForm& form) {
  return {{form.groups, words_of_rows(form)}};
}
StoredShapes gemm_scale_shapes(const MatrixForm& form) { return {{form.groups, form.rows}}; }

// The code of a row in a line of words: a column of the matrix, or a group of columns.
uint32_t gemm_code(const MatrixForm& form, std::span<const std::byte> words, int64_t line,
                   int64_t row) {
  const uint32_t word = word_at(words, line * words_of_rows(form) + row / kCodesInAWord);
  return code_of(word, kPlaces[static_cast<size_t>(row % kCodesInAWord)]);
}

void decode_gemm_codes(const MatrixForm& form, std::span<const PlaneInput> inputs,
                       std::span<std::byte> plane) {
  if (inputs.size() > 1 && inputs[1].info != nullptr) {
    check_input(inputs[1], kWordTypes, gemm_zero_shapes(form));
    for (int64_t i = 0; i < form.groups * form.rows; ++i) {
      const int64_t zero = gemm_code(form, inputs[1].bytes, i / form.rows, i % form.rows);
      if (zero == middle_of(kBits)) continue;
      reject_value(inputs[1], "a zero point of symmetric codes", middle_of(kBits), zero);
    }
  }
  // Eight rows at once read each word once, and write bytes that lie close together.
  for (int64_t first = 0; first < form.rows; first += kCodesInAWord) {
    const int64_t count = std::min(kCodesInAWord, form.rows - first);
    for (int64_t col = 0; col < form.cols; ++col) {
      const uint32_t word =
          word_at(inputs[0].bytes, col * words_of_rows(form) + first / kCodesInAWord);
      for (int64_t row = 0; row < count; ++row) {
        const uint32_t code = code_of(word, kPlaces[static_cast<size_t>(row)]);
        set_integer(plane.data(), (first + row) * form.cols + col, kBits, code);
      }
    }
  }
}

void decode_gemm_zeros(const MatrixForm& form, std::span<const PlaneInput> inputs,
                       std::span<std::byte> plane) {
  for (int64_t row = 0; row < form.rows; ++row) {
    for (int64_t group = 0; group < form.groups; ++group) {
      const int64_t zero = gemm_code(form, inputs[0].bytes, group, row);
      set_float(plane, row * form.groups + group, static_cast<float>(zero - middle_of(kBits)));
    }
  }
}

void decode_gemm_scales(const MatrixForm& form, std::span<const PlaneInput> inputs,
                        std::span<std::byte> plane) {
  transpose(inputs[0], form.groups, form.rows, plane);
}

// The zero point of a row in a group as files have it; symmetric codes have the middle one.
uint32_t stored_zero(const MatrixForm& form, const MatrixPlanes& planes, int64_t row,
                     int64_t group) {
  int64_t zero = middle_of(kBits);
  if (!planes.zeros.empty()) {
    zero += static_cast<int64_t>(value_at<float>(planes.zeros, row * form.groups + group));
  }
  return static_cast<uint32_t>(zero);
}

// Adds the code of a row to a line of words that begins as 0.
void put_gemm_code(const MatrixForm& form, std::span<std::byte> words, int64_t line, int64_t row,
                   uint32_t code) {
  const int64_t place = kPlaces[static_cast<size_t>(row % kCodesInAWord)];
  put_in_line(words, line * words_of_rows(form) + row / kCodesInAWord, 1, place, kBits, code);
}

void encode_gemm_codes(const MatrixForm& form, const MatrixPlanes& planes,
                       std::span<std::byte> tensor) {
  for (int64_t row = 0; row < form.rows; ++row) {
    const std::byte* const codes = planes.codes.data() + row * ceil_div(form.cols, 2);
    for (int64_t col = 0; col < form.cols; ++col) {
      put_gemm_code(form, tensor, col, row, stored_integer(codes, col, kBits));
    }
  }
}

void encode_gemm_zeros(const MatrixForm& form, const MatrixPlanes& planes,
                       std::span<std::byte> tensor) {
  for (int64_t row = 0; row < form.rows; ++row) {
    for (int64_t group = 0; group < form.groups; ++group) {
      put_gemm_code(form, tensor, group, row, stored_zero(form, planes, row, group));
    }
  }
}

void encode_gemm_scales(const MatrixForm& form, const MatrixPlanes& planes,
                        std::span<std::byte> tensor) {
  const int64_t bytes = static_cast<int64_t>(tensor.size()) / (form.rows * form.groups);
  transpose(planes.scales, bytes, form.rows, form.groups, tensor);
}

template <bool kHasZeros>
constexpr std::array kGemm = {
    StoredPlane{.suffix = ".qweight",
                .types = kWordTypes,
                .shapes = gemm_code_shapes,
                .decode = decode_gemm_codes,
                .optional_inputs = std::span(kAids).first(kHasZeros ? 0 : 1),
                .encode = encode_gemm_codes},
    StoredPlane{.suffix = ".scales",
                .plane = WeightPlane::kScale,
                .types = kFloatTypes,
                .shapes = gemm_scale_shapes,
                .decode = decode_gemm_scales,
                .encode = encode_gemm_scales},
    StoredPlane{.suffix = kZeros,
                .use = kHasZeros ? StoredPlane::Use::kPlane : StoredPlane::Use::kInput,
                .plane = WeightPlane::kZero,
                .types = kWordTypes,
                .shapes = gemm_zero_shapes,
                .type = DType::kF32,
                .decode = decode_gemm_zeros,
                .encode = encode_gemm_zeros},
};

// Layout "gemv".

// Its kernels read zero points of as many words as make a block of theirs.
int64_t zero_words(const MatrixForm& form) {
  const int64_t lines = form.group_cols >= 128 ? 1 : form.group_cols == 64 ? 2 : 4;
  return round_up(ceil_div(form.groups, kCodesInAWord), lines);
}

StoredShapes gemv_code_shapes(const MatrixForm& form) {
  return {{form.rows, ceil_div(form.cols, kCodesInAWord)}};
}
StoredShapes gemv_zero_shapes(const MatrixForm& form) { return {{form.rows, zero_words(form)}}; }
StoredShapes gemv_scale_shapes(const MatrixForm& form) {
  return {{form.rows, zero_words(form) * kCodesInAWord}};
}

bool fills_words(const MatrixForm& form) { return form.cols % kCodesInAWord == 0; }

uint32_t gemv_code(std::span<const std::byte> words, int64_t line_words, int64_t row, int64_t at) {
  return code_of(word_at(words, row * line_words + at / kCodesInAWord), at % kCodesInAWord);
}

void decode_gemv_codes(const MatrixForm& form, std::span<const PlaneInput> inputs,
                       std::span<std::byte> plane) {
  const int64_t words = ceil_div(form.cols, kCodesInAWord);
  for (int64_t row = 0; row < form.rows; ++row) {
    for (int64_t col = 0; col < form.cols; ++col) {
      set_integer(plane.data(), row * form.cols + col, kBits,
                  gemv_code(inputs[0].bytes, words, row, col));
    }
  }
}

void decode_gemv_zeros(const MatrixForm& form, std::span<const PlaneInput> inputs,
                       std::span<std::byte> plane) {
  for (int64_t row = 0; row < form.rows; ++row) {
    for (int64_t group = 0; group < form.groups; ++group) {
      const int64_t zero = gemv_code(inputs[0].bytes, zero_words(form), row, group);
      set_float(plane, row * form.groups + group, static_cast<float>(zero - middle_of(kBits)));
    }
  }
}

void decode_gemv_scales(const MatrixForm& form, std::span<const PlaneInput> inputs,
                        std::span<std::byte> plane) {
  const size_t bytes = plane.size() / static_cast<size_t>(form.rows);
  const size_t stored = inputs[0].bytes.size() / static_cast<size_t>(form.rows);
  for (size_t row = 0; row < static_cast<size_t>(form.rows); ++row) {
    std::memcpy(plane.data() + row * bytes, inputs[0].bytes.data() + row * stored, bytes);
  }
}

void encode_gemv_zeros(const MatrixForm& form, const MatrixPlanes& planes,
                       std::span<std::byte> tensor) {
  for (int64_t row = 0; row < form.rows; ++row) {
    for (int64_t group = 0; group < form.groups; ++group) {
      put_in_line(tensor, row * zero_words(form), 1, group, kBits,
                  stored_zero(form, planes, row, group));
    }
  }
}

void encode_gemv_scales(const MatrixForm& form, const MatrixPlanes& planes,
                        std::span<std::byte> tensor) {
  const size_t bytes = planes.scales.size() / static_cast<size_t>(form.rows);
  const size_t stored = tensor.size() / static_cast<size_t>(form.rows);
  for (size_t row = 0; row < static_cast<size_t>(form.rows); ++row) {
    std::memcpy(tensor.data() + row * stored, planes.scales.data() + row * bytes, bytes);
  }
}

constexpr std::array kGemv = {
    StoredPlane{.suffix = ".qweight",
                .types = kWordTypes,
                .shapes = gemv_code_shapes,
                .decode = decode_gemv_codes,
                .lies_in_place = fills_words},
    StoredPlane{.suffix = ".scales",
                .plane = WeightPlane::kScale,
                .types = kFloatTypes,
                .shapes = gemv_scale_shapes,
                .decode = decode_gemv_scales,
                .encode = encode_gemv_scales},
    StoredPlane{.suffix = kZeros,
                .plane = WeightPlane::kZero,
                .types = kWordTypes,
                .shapes = gemv_zero_shapes,
                .type = DType::kF32,
                .decode = decode_gemv_zeros,
                .encode = encode_gemv_zeros},
};

// Files of the first versions have other keys.
io::JsonValue either(const io::JsonValue& config, std::string_view key, std::string_view older) {
  const auto value = config.find_set(older);
  return value ? *value : config.at(key);
}

}  // namespace

QuantizedWeights read_awq(const io::JsonValue& config) {
  std::string version = text_of(config, "version", "gemm");
  std::transform(version.begin(), version.end(), version.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  if (version != "gemm" && version != "gemv") {
    refuse_layout(version, "awq of version " + version);
  }
  const int64_t bits = either(config, "bits", "w_bit").as_int64();
  if (bits != kBits) throw NotRead{fmt::format("codes of {} bits", bits)};
  QuantSpec spec;
  const io::JsonValue group = either(config, "group_size", "q_group_size");
  set_group(group, spec);
  const bool gemv = version == "gemv";
  // Layers of "gemv" always have zero points.
  const bool has_zeros = gemv || flag_of(config, "zero_point", true);
  spec.zeros = has_zeros ? WeightZero::kPoint : WeightZero::kNone;
  QuantizedWeights weights{.element = integer_type(bits), .spec = spec, .stored = {.bits = bits}};
  weights.whole_groups = key_of(group);
  if (gemv) {
    weights.planes = kGemv;
  } else {
    weights.planes = has_zeros ? std::span(kGemm<true>) : std::span(kGemm<false>);
  }
  return weights;
}

std::string write_awq(const MethodForm& form, const std::vector<std::string>& kept) {
  const bool groups = form.quant.weights == WeightScale::kBlock;
  const nlohmann::ordered_json config = {{"quant_method", form.method},
                                         {"bits", form.code_bits},
                                         {"group_size", groups ? form.quant.block_cols : -1},
                                         {"zero_point", form.quant.zeros != WeightZero::kNone},
                                         {"version", form.format.empty() ? "gemm" : form.format},
                                         {"modules_to_not_convert", kept}};
  return config.dump();
}

}  // namespace conclave::inline v0::checkpoint
