#include "quant/code_meaning.h"

#include "core/float8.h"
#include "core/located.h"
#include "core/row_stride.h"
#include "core/weight_types.h"
#include "quant/planes.h"
#include "quant/weight_block.h"
#include "quant/weight_format.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>

namespace conclave::inline v0 {
namespace {

// Scales of one byte are powers of two, or have a format of weights.
std::vector<float> widen(const ConstTensorView& scales) {
  const int64_t rows = scales.shape[0];
  const int64_t cols = scales.shape[1];
  std::vector<float> values(static_cast<size_t>(rows * cols));
  if (is_plain(scales.dtype)) {
    convert(scales, {.data = values.data(), .dtype = DType::kF32, .shape = scales.shape});
    return values;
  }
  const int64_t stride = row_stride(scales);
  const auto* codes = static_cast<const std::byte*>(scales.data);
  for (int64_t row = 0; row < rows; ++row) {
    float* const out = values.data() + row * cols;
    const std::byte* const in = codes + row * stride;
    if (scales.dtype == DType::kF8E8M0) {
      std::transform(in, in + cols, out,
                     [](std::byte code) { return e8m0_to_float(static_cast<uint8_t>(code)); });
    } else {
      quant::format_of(scales.dtype).decode(in, 0, cols, out);
    }
  }
  return values;
}

// Whether all are finite, and without signs not negative. Sums whose highest bit answers make a
// loop that has vectors on every CPU; a zero may have either sign.
bool all_are_numbers(std::span<const float> values, bool have_signs) {
  uint32_t infinite = 0;
  uint32_t negative = 0;
  for (const float value : values) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffU;
    infinite |= magnitude + 0x00800000U;
    negative |= bits & ~(magnitude - 1U);
  }
  return infinite >> 31U == 0 && (have_signs || negative >> 31U == 0);
}

// Whether numbers of a byte are all of those that come before the first that is none. Bytes behind
// it may be numbers as well.
bool are_first_numbers(const ConstTensorView& bytes, bool have_signs) {
  std::array<uint8_t, 256> each{};
  std::iota(each.begin(), each.end(), uint8_t{0});
  const std::vector<float> values =
      widen({.data = each.data(), .dtype = bytes.dtype, .shape = {1, std::ssize(each)}});
  int64_t count = 0;
  while (count < std::ssize(each) &&
         all_are_numbers(std::span(values).subspan(static_cast<size_t>(count), 1), have_signs)) {
    ++count;
  }
  uint8_t most = 0;
  for (int64_t row = 0; row < bytes.shape[0]; ++row) {
    const auto* const in = static_cast<const uint8_t*>(bytes.data) + row * row_stride(bytes);
    for (int64_t col = 0; col < bytes.shape[1]; ++col) most = std::max(most, in[col]);
  }
  return most < count;
}

template <class Read>
auto load_block(const WeightSource& source, WeightId id, int64_t expert, const WeightBlock& block,
                const Read& read) {
  BlockLoader loader(source);
  const BlockRequest request{.id = id, .expert = expert, .block = block};
  ConstTensorView view;
  loader.load({&request, 1}, {&view, 1});
  return read(view);
}

[[noreturn]] void refuse(const WeightSource& source, WeightId id, int64_t expert, float value,
                         const char* expected) {
  const auto what = [&] {
    if (id.plane() == WeightPlane::kZero) return "the zero of some codes has no meaning";
    if (id.plane() == WeightPlane::kColumnFactor) return "the factor of a column has no meaning";
    return "a scale has no meaning";
  };
  throw Error(ErrorCode::kTensorValue,
              located(source.locate(id, expert),
                      {.what = what(), .expected = expected, .found = fmt::format("{}", value)}));
}

constexpr WeightBlock kSingle{0, 1, 0, 1};

void take_largest(const WeightSource& source, WeightId matrix, float& largest) {
  const WeightId id = matrix.with(WeightPlane::kInputScale);
  const int64_t count = source.describe(id).count;
  for (int64_t expert = 0; expert < count; ++expert) {
    const float value = load_scales({}, source, id, expert, kSingle).front();
    if (!(value > 0)) refuse(source, id, expert, value, "finite and positive");
    largest = std::max(largest, value);
  }
}

std::vector<int32_t> as_int32(const ConstTensorView& ids) {
  std::vector<int32_t> values(static_cast<size_t>(ids.shape.num_elements()));
  for (size_t i = 0; i < values.size(); ++i) {
    if (ids.dtype == DType::kI32) {
      values[i] = static_cast<const int32_t*>(ids.data)[i];
      continue;
    }
    const int64_t wide = static_cast<const int64_t*>(ids.data)[i];
    values[i] = wide >= 0 && wide <= INT32_MAX ? static_cast<int32_t>(wide) : -1;
  }
  return values;
}

// Reads what the codes of one matrix need, for blocks of it.
class MeaningLoader {
 public:
  MeaningLoader(const QuantSpec& quant, const WeightSource& source, WeightId matrix, int64_t expert)
      : quant_(quant), source_(source), matrix_(matrix), expert_(expert) {
    const WeightInfo info = source.describe(matrix);
    plane_ = quant::plane_of(WeightPlane::kScale, info.dtype, quant, info.rows, info.cols);
    cols_ = info.cols;
  }

  CodeMeaning load(const WeightBlock& block) const {
    const quant::PlaneSlice part = part_of(block);
    CodeMeaning meaning = load_as_stored(block);
    const int64_t rows = block.row_end - block.row_begin;
    if (plane_.block_rows == 1) return meaning;
    meaning.scales = repeat_rows(meaning.scales, part, rows);
    if (!meaning.offsets.empty()) meaning.offsets = repeat_rows(meaning.offsets, part, rows);
    return meaning;
  }

  CodeMeaning load_as_stored(const WeightBlock& block) const {
    const quant::PlaneSlice part = part_of(block);
    CodeMeaning meaning;
    meaning.groups = part.block.col_end - part.block.col_begin;
    meaning.scales =
        load_scales(quant_, source_, matrix_.with(WeightPlane::kScale), expert_, part.block);
    if (quant_.has_global_scale) multiply(meaning.scales, load_global());
    if (quant_.zeros != WeightZero::kNone) {
      meaning.offsets = load_zeros(part.block);
      if (quant_.zeros == WeightZero::kPoint) multiply(meaning.offsets, meaning.scales);
    }
    if (quant_.has_column_order) meaning.order = load_order(block);
    if (quant_.has_column_factors) meaning.factors = load_factors(block);
    return meaning;
  }

  void check(const WeightBlock& block) const {
    const WeightId id = matrix_.with(WeightPlane::kScale);
    const quant::PlaneSlice part = part_of(block);
    const DType dtype = source_.describe(id).dtype;
    const bool are_good =
        !is_plain(dtype) && bit_size(dtype) == 8 &&
        load_block(source_, id, expert_, part.block, [&](const ConstTensorView& bytes) {
          return are_first_numbers(bytes, quant_.signed_scales);
        });
    if (!are_good) load_scales(quant_, source_, id, expert_, part.block);
    if (quant_.has_global_scale) load_global();
    if (quant_.zeros != WeightZero::kNone) load_zeros(part.block);
    if (quant_.has_column_order) load_order(block);
    if (quant_.has_column_factors) load_factors(block);
  }

  std::vector<int32_t> load_order(const WeightBlock& block) const {
    const WeightId id = matrix_.with(WeightPlane::kColumnOrder);
    std::vector<int32_t> order =
        load_block(source_, id, expert_, {0, 1, block.col_begin, block.col_end}, as_int32);
    const auto groups = static_cast<int32_t>(plane_.cols);
    for (const int32_t group : order) {
      if (group >= 0 && group < groups) continue;
      throw Error(
          ErrorCode::kTensorValue,
          located(source_.locate(id, expert_), {.what = "a column belongs to no group of columns",
                                                .expected = fmt::format("0 to {}", groups - 1),
                                                .found = fmt::format("{}", group)}));
    }
    return order;
  }

  // Gate and up read the same rows.
  std::vector<float> load_factors(const WeightBlock& block) const {
    const WeightId id = matrix_.with(WeightPlane::kColumnFactor);
    std::vector<float> factors = read_factors(id, block);
    const WeightId gate(*id.mlp(), WeightMatrix::kGate);
    if (id.matrix() != WeightMatrix::kUp || source_.describe(gate).count == 0) return factors;
    const std::vector<float> of_gate = read_factors(gate.with(WeightPlane::kColumnFactor), block);
    const auto [up, other] = std::ranges::mismatch(factors, of_gate);
    if (up == factors.end()) return factors;
    throw Error(ErrorCode::kTensorValue,
                located(source_.locate(matrix_, expert_),
                        {.what = "gate and up of an expert scale the same rows in two ways",
                         .expected = fmt::format("the factor {} of column {}, as {}", *other,
                                                 block.col_begin + (up - factors.begin()),
                                                 source_.locate(gate, expert_)),
                         .found = fmt::format("{}", *up)}));
  }

 private:
  // The scales of a block; with an order, columns may have any of a row's.
  quant::PlaneSlice part_of(const WeightBlock& block) const {
    if (!quant_.has_column_order) return quant::slice(plane_, block);
    return quant::slice(plane_, {block.row_begin, block.row_end, 0, cols_});
  }

  std::vector<float> repeat_rows(const std::vector<float>& loaded, const quant::PlaneSlice& part,
                                 int64_t rows) const {
    const int64_t cols = part.block.col_end - part.block.col_begin;
    std::vector<float> of_rows;
    of_rows.reserve(static_cast<size_t>(rows * cols));
    for (int64_t row = 0; row < rows; ++row) {
      const auto first = loaded.begin() + (part.skipped_rows + row) / plane_.block_rows * cols;
      of_rows.insert(of_rows.end(), first, first + cols);
    }
    return of_rows;
  }

  static void multiply(std::vector<float>& values, float factor) {
    for (float& value : values) value *= factor;
  }
  static void multiply(std::vector<float>& values, const std::vector<float>& factors) {
    for (size_t i = 0; i < values.size(); ++i) values[i] *= factors[i];
  }

  float load_global() const {
    return load_scales(quant_, source_, matrix_.with(WeightPlane::kGlobalScale), expert_, kSingle)
        .front();
  }

  std::vector<float> load_zeros(const WeightBlock& block) const {
    const WeightId id = matrix_.with(WeightPlane::kZero);
    std::vector<float> zeros = load_block(source_, id, expert_, block, widen);
    if (all_are_numbers(zeros, true)) return zeros;
    for (const float zero : zeros) {
      if (!std::isfinite(zero)) refuse(source_, id, expert_, zero, "finite");
    }
    return zeros;
  }

  std::vector<float> read_factors(WeightId id, const WeightBlock& block) const {
    const WeightBlock columns{0, 1, block.col_begin, block.col_end};
    if (source_.describe(id).count == 0) {
      return std::vector<float>(static_cast<size_t>(block.col_end - block.col_begin), 1.0F);
    }
    std::vector<float> factors = load_block(source_, id, expert_, columns, widen);
    for (const float factor : factors) {
      if (!std::isfinite(factor)) refuse(source_, id, expert_, factor, "finite");
    }
    return factors;
  }

  const QuantSpec& quant_;
  const WeightSource& source_;
  WeightId matrix_;
  int64_t expert_;
  quant::PlaneShape plane_;
  int64_t cols_ = 0;
};

}  // namespace

std::vector<float> load_scales(const QuantSpec& quant, const WeightSource& source, WeightId id,
                               int64_t expert, const WeightBlock& block) {
  std::vector<float> scales = load_block(source, id, expert, block, widen);
  if (all_are_numbers(scales, quant.signed_scales)) return scales;
  for (const float value : scales) {
    if (std::isfinite(value) && (quant.signed_scales || value >= 0)) continue;
    refuse(source, id, expert, value, quant.signed_scales ? "finite" : "finite and not negative");
  }
  return scales;
}

CodeMeaning load_meaning(const QuantSpec& quant, const WeightSource& source, WeightId matrix,
                         int64_t expert, const WeightBlock& block) {
  return MeaningLoader(quant, source, matrix, expert).load(block);
}

CodeMeaning load_meaning_as_stored(const QuantSpec& quant, const WeightSource& source,
                                   WeightId matrix, int64_t expert, const WeightBlock& block) {
  return MeaningLoader(quant, source, matrix, expert).load_as_stored(block);
}

void check_meaning(const QuantSpec& quant, const WeightSource& source, WeightId matrix,
                   int64_t expert, const WeightBlock& block) {
  MeaningLoader(quant, source, matrix, expert).check(block);
}

std::vector<int32_t> load_column_order(const QuantSpec& quant, const WeightSource& source,
                                       WeightId matrix, int64_t expert, const WeightBlock& block) {
  return MeaningLoader(quant, source, matrix, expert).load_order(block);
}

std::vector<float> load_column_factors(const QuantSpec& quant, const WeightSource& source,
                                       WeightId matrix, int64_t expert, const WeightBlock& block) {
  return MeaningLoader(quant, source, matrix, expert).load_factors(block);
}

StaticScales load_static_scales(const WeightSource& source, WeightMlp mlp) {
  StaticScales scales{.input = 0, .intermediate = 0};
  take_largest(source, {mlp, WeightMatrix::kGate}, scales.input);
  take_largest(source, {mlp, WeightMatrix::kUp}, scales.input);
  take_largest(source, {mlp, WeightMatrix::kDown}, scales.intermediate);
  return scales;
}

}  // namespace conclave::inline v0
