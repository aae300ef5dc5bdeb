#include "checkpoint/methods/compressed_tensors_planes.h"

#include "checkpoint/methods/shared_planes.h"
#include "checkpoint/methods/words.h"
#include "core/checked.h"
#include "core/quant_spec.h"

namespace conclave::inline v0::checkpoint {
namespace {

int64_t bits_of(const MatrixForm& form) { return form.quant->stored.bits; }

// Codes of 3, 5, 6 and 7 bits once had whole words each, and now lie across words.
int64_t words_of(int64_t codes, int64_t bits) { return ceil_div(codes * bits, kWordBits); }
int64_t whole_words_of(int64_t codes, int64_t bits) { return ceil_div(codes, kWordBits / bits); }

// How a line of codes lies in `words` words.
WordLayout layout_of(int64_t codes, int64_t words, int64_t bits) {
  const bool across = words == words_of(codes, bits);
  const bool whole = words == whole_words_of(codes, bits);
  if (across != whole) return across ? WordLayout::kAcross : WordLayout::kWhole;
  const bool same = kWordBits % bits == 0 || codes <= kWordBits / bits;
  return same ? WordLayout::kSame : WordLayout::kEither;
}
WordLayout layout_of_codes(const MatrixForm& form, std::span<const int64_t> shape) {
  return layout_of(form.cols, shape.back(), bits_of(form));
}
WordLayout layout_of_zeros(const MatrixForm& form, std::span<const int64_t> shape) {
  return layout_of(form.scale_rows, shape[shape.size() - 2], bits_of(form));
}

// Whether codes of the tensor have whole words each. Throws Error(kTensorShape) if nothing tells.
bool has_whole_words(const MatrixForm& form, WordLayout own, const PlaneInput& input) {
  WordLayout layout = own == WordLayout::kEither ? form.words : own;
  if (layout == WordLayout::kEither) layout = form.quant->stored.words;
  if (layout == WordLayout::kEither) reject_words(input.file, *input.info);
  return layout == WordLayout::kWhole;
}

// Code `index` of a line.
template <class Word>
uint32_t code_of(const Word& word, bool whole_words, int64_t index, int64_t bits) {
  if (!whole_words) return code_in_line(word, index, bits);
  const int64_t each = kWordBits / bits;
  return word(index / each) >> (index % each * bits) & ((uint32_t{1} << bits) - 1);
}

StoredShapes code_shapes(const MatrixForm& form) {
  const int64_t bits = bits_of(form);
  return {{form.rows, words_of(form.cols, bits)}, {form.rows, whole_words_of(form.cols, bits)}};
}
bool fills_words(const MatrixForm& form) {
  return bits_of(form) == integer_bits(bits_of(form)) && form.cols * bits_of(form) % kWordBits == 0;
}
void decode_codes(const MatrixForm& form, std::span<const PlaneInput> inputs,
                  std::span<std::byte> plane) {
  const int64_t bits = bits_of(form);
  const std::vector<int64_t>& shape = inputs[0].info->shape;
  const int64_t words = shape.back();
  const bool whole = has_whole_words(form, layout_of_codes(form, shape), inputs[0]);
  for (int64_t row = 0; row < form.rows; ++row) {
    const auto word = [&](int64_t i) { return word_at(inputs[0].bytes, row * words + i); };
    for (int64_t col = 0; col < form.cols; ++col) {
      set_integer(plane.data(), row * form.cols + col, bits, code_of(word, whole, col, bits));
    }
  }
}

// Zero points in words lie along the rows of scales, which may be fewer than those of the matrix.
StoredShapes zero_word_shapes(const MatrixForm& form) {
  const int64_t bits = bits_of(form);
  return {{words_of(form.scale_rows, bits), form.groups},
          {whole_words_of(form.scale_rows, bits), form.groups}};
}
void decode_zero_words(const MatrixForm& form, std::span<const PlaneInput> inputs,
                       std::span<std::byte> plane) {
  const int64_t bits = bits_of(form);
  const WordLayout layout = layout_of_zeros(form, inputs[0].info->shape);
  const bool whole = has_whole_words(form, layout, inputs[0]);
  for (int64_t group = 0; group < form.groups; ++group) {
    const auto word = [&](int64_t i) { return word_at(inputs[0].bytes, i * form.groups + group); };
    for (int64_t row = 0; row < form.scale_rows; ++row) {
      const uint32_t zero = code_of(word, whole, row, bits);
      set_float(plane, row * form.groups + group,
                static_cast<float>(static_cast<int64_t>(zero) - middle_of(bits)));
    }
  }
}

// Others are numbers as the codes are, with a sign.
constexpr std::array kZeroTypes = {DType::kI8};
StoredShapes zero_shapes(const MatrixForm& form) {
  StoredShapes shapes = scales_as_read(form);
  if (form.groups == 1) shapes.push_back({form.scale_rows});
  return shapes;
}
void decode_zeros(const MatrixForm&, std::span<const PlaneInput> inputs,
                  std::span<std::byte> plane) {
  const auto count = static_cast<int64_t>(inputs[0].bytes.size());
  for (int64_t i = 0; i < count; ++i) {
    set_float(plane, i, static_cast<float>(value_at<int8_t>(inputs[0].bytes, i)));
  }
}

constexpr StoredPlane kWordCodes = {.suffix = "_packed",
                                    .ending = "",
                                    .types = kWordTypes,
                                    .shapes = code_shapes,
                                    .words = layout_of_codes,
                                    .decode = decode_codes,
                                    .lies_in_place = fills_words};
constexpr StoredPlane with_signs_flipped(StoredPlane codes) {
  codes.convert = flip_signs;
  return codes;
}
constexpr StoredPlane kZeroWords = {.suffix = "_zero_point",
                                    .ending = "",
                                    .plane = WeightPlane::kZero,
                                    .types = kWordTypes,
                                    .shapes = zero_word_shapes,
                                    .type = DType::kF32,
                                    .words = layout_of_zeros,
                                    .decode = decode_zero_words};
constexpr StoredPlane kZeroBytes = {.suffix = "_zero_point",
                                    .ending = "",
                                    .plane = WeightPlane::kZero,
                                    .types = kZeroTypes,
                                    .shapes = zero_shapes,
                                    .type = DType::kF32,
                                    .decode = decode_zeros};
constexpr StoredPlane kOrder = {.suffix = "_g_idx",
                                .ending = "",
                                .plane = WeightPlane::kColumnOrder,
                                .types = kIndexTypes,
                                .shapes = columns};
// Sizes say what the configuration says; they are written beside words alone.
constexpr std::array kSizeTypes = {DType::kI64};
StoredShapes size_shapes(const MatrixForm&) { return {{2}}; }
void encode_sizes(const MatrixForm& form, const MatrixPlanes&, std::span<std::byte> tensor) {
  const std::array<int64_t, 2> sizes = {form.rows, form.cols};
  std::memcpy(tensor.data(), sizes.data(), sizeof(sizes));
}
constexpr StoredPlane kShape = unused("_shape", "");
constexpr StoredPlane kWrittenShape = {.suffix = "_shape",
                                       .ending = "",
                                       .use = StoredPlane::Use::kUnused,
                                       .types = kSizeTypes,
                                       .shapes = size_shapes,
                                       .encode = encode_sizes};

constexpr std::array kPairs = {pairs_of_codes("_packed", ""), kShape};
constexpr std::array kPairsWithExponents = {pairs_of_codes("_packed", ""), exponents("_scale", ""),
                                            kShape};
constexpr StoredPlane kDivisor = {.suffix = "_global_scale",
                                  .ending = "",
                                  .plane = WeightPlane::kGlobalScale,
                                  .types = kFloatTypes,
                                  .shapes = single,
                                  .type = DType::kF32,
                                  .decode = decode_divisor,
                                  .encode = encode_divisor};
constexpr StoredPlane kRowDivisor = {.suffix = ".input_global_scale",
                                     .plane = WeightPlane::kInputScale,
                                     .types = kFloatTypes,
                                     .shapes = single,
                                     .type = DType::kF32,
                                     .decode = decode_divisor,
                                     .encode = encode_divisor};
constexpr std::array kPairsWithGlobal = {pairs_of_codes("_packed", ""), kDivisor,
                                         unused(".input_global_scale"), kShape};
constexpr std::array kPairsWithRows = {pairs_of_codes("_packed", ""), kDivisor, kRowDivisor,
                                       kShape};
constexpr std::array kExponents = {exponents("_scale", "")};

// The rows for zero points and orders of columns follow those that are always there.
struct Words {
  std::array<StoredPlane, 2> symmetric;
  std::array<StoredPlane, 3> with_zeros;
  std::array<StoredPlane, 3> with_order;
  std::array<StoredPlane, 4> with_both;
};
constexpr Words words_with(const StoredPlane& codes) {
  return {.symmetric = {codes, kWrittenShape},
          .with_zeros = {codes, kZeroWords, kWrittenShape},
          .with_order = {codes, kOrder, kWrittenShape},
          .with_both = {codes, kZeroWords, kOrder, kWrittenShape}};
}
constexpr Words kWords = words_with(kWordCodes);
constexpr Words kWordsOfBytes = words_with(with_signs_flipped(kWordCodes));

std::span<const StoredPlane> in_words(const Words& words, const QuantSpec& spec) {
  const bool zeros = spec.zeros != WeightZero::kNone;
  if (spec.has_column_order)
    return zeros ? std::span<const StoredPlane>(words.with_both) : words.with_order;
  return zeros ? std::span<const StoredPlane>(words.with_zeros) : words.symmetric;
}

constexpr std::array kBytesWithZeros = {kZeroBytes};
constexpr std::array kBytesWithOrder = {kOrder};
constexpr std::array kBytesWithBoth = {kZeroBytes, kOrder};

std::span<const StoredPlane> in_bytes(const QuantSpec& spec) {
  const bool zeros = spec.zeros != WeightZero::kNone;
  if (zeros && spec.has_column_order) return kBytesWithBoth;
  if (zeros) return kBytesWithZeros;
  return spec.has_column_order ? std::span<const StoredPlane>(kBytesWithOrder)
                               : std::span<const StoredPlane>();
}

}  // namespace

std::span<const StoredPlane> compressed_planes(const CompressedStorage& storage,
                                               const QuantSpec& spec) {
  using Kind = CompressedStorage::Kind;
  if (storage.kind == Kind::kWords) {
    return in_words(storage.bits == 8 ? kWordsOfBytes : kWords, spec);
  }
  if (storage.kind == Kind::kPairs) {
    if (has_input_scale(spec)) return kPairsWithRows;
    if (spec.has_global_scale) return kPairsWithGlobal;
    return storage.scales_in_bytes ? std::span<const StoredPlane>(kPairsWithExponents) : kPairs;
  }
  return storage.scales_in_bytes ? std::span<const StoredPlane>(kExponents) : in_bytes(spec);
}

}  // namespace conclave::inline v0::checkpoint
