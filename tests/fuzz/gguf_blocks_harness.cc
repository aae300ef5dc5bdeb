// Blocks of any GGUF types and bytes: taken apart, decoded whole and in slices, and read as the
// weights of a layer whose matrices mix types.
#include "fuzz/fuzz_input.h"
#include "fuzz/harness.h"
#include "fuzz/promises.h"
#include "fuzz/weight_walk.h"
#include "quant/gguf/block_type.h"

#include "conclave/gguf.h"
#include "conclave/gguf_blocks.h"

#include <array>
#include <cmath>
#include <deque>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

constexpr int64_t kExperts = 1;
// Rows have whole blocks of any type; of a matrix a few are read.
constexpr int64_t kWidth = 256;
constexpr int64_t kRowsRead = 2;

std::vector<std::string_view> all_types() {
  std::vector<std::string_view> types;
  for (const quant::BlockType& type : quant::block_types()) types.push_back(type.name);
  types.insert(types.end(), {"F32", "F16", "BF16"});
  return types;
}

bool same_number(float one, float other) {
  if (std::isnan(one) || std::isnan(other)) return std::isnan(one) && std::isnan(other);
  return one == other && std::signbit(one) == std::signbit(other);
}

// Codes lie in the range that the table states, on which the choice of a layer's type rests.
void check_parts(const quant::BlockType& type, const std::byte* row, int64_t blocks) {
  quant::BlockParts parts;
  for (int64_t block = 0; block < blocks; ++block) {
    type.take_apart(row + block * type.bytes, parts);
    for (int64_t i = 0; i < type.elements; ++i) {
      promise(parts.codes[i] >= type.least && parts.codes[i] <= type.largest);
    }
  }
}

void check_decoding(FuzzInput& input, const quant::BlockType& type) {
  const auto blocks = static_cast<int64_t>(1 + input.below(3));
  const auto count = blocks * type.elements;
  const auto begin = static_cast<int64_t>(input.byte()) * 3 % count;
  const int64_t part = std::min<int64_t>(count - begin, input.byte());
  // Not one byte more than the row has, so that a sanitizer sees what is read beyond it.
  std::vector<std::byte> row(static_cast<size_t>(blocks * type.bytes));
  fill_from(input.rest(), 0, row);
  check_parts(type, row.data(), blocks);
  std::vector<float> whole(static_cast<size_t>(count));
  quant::decode_blocks(type, row.data(), 0, count, whole.data());
  std::vector<float> slice(static_cast<size_t>(part));
  quant::decode_blocks(type, row.data(), begin, part, slice.data());
  for (size_t i = 0; i < slice.size(); ++i) {
    promise(same_number(slice[i], whole[static_cast<size_t>(begin) + i]));
  }
}

// Encodes finite values of any size: what comes back is no NaN.
void check_encoding(FuzzInput& input) {
  const std::vector<std::string_view> types = BlockQuantiser::types();
  const std::string_view name = types[input.below(types.size())];
  const ScaleRule rule = input.below(8) == 0 ? ScaleRule::kSearch : ScaleRule::kAmax;
  const BlockQuantiser quantiser(name, rule);
  std::vector<float> values(static_cast<size_t>(quantiser.block_elements()));
  fill_from(input.rest(), 0, std::as_writable_bytes(std::span(values)));
  for (float& value : values) {
    if (!std::isfinite(value)) value = 0;
  }
  const auto count = static_cast<int64_t>(values.size());
  const QuantisedRows rows = quantiser.quantise(values, 1, count);
  const quant::BlockType& type = *quant::find_block_type(name);
  promise(rows.codes.size() == static_cast<size_t>(type.bytes));
  quant::decode_blocks(type, rows.codes.data(), 0, count, values.data());
  for (const float value : values) promise(std::isfinite(value));
}

// The layers that files of such types have are exact, but where offsets of 4-bit codes are rounded
// once more, and where a scale is no number or twice it is none.
bool is_exact(const quant::BlockType& type, DType codes) {
  return !(type.has_offset && codes == DType::kI4);
}

struct PutMatrix {
  WeightId id;
  int64_t expert = 0;
  std::string_view type;
  std::vector<std::byte> bytes;
};

void check_values(const PutMatrix& put, const MoeSpec& spec, const WeightSource& source,
                  const WeightBlock& rows) {
  const auto values = read_floats(spec, source, put.id, put.expert, rows);
  if (!values) return;  // a scale is no number
  const quant::BlockType* const type = quant::find_block_type(put.type);
  if (type == nullptr || !is_exact(*type, source.describe(put.id).dtype)) return;
  std::vector<float> expected(static_cast<size_t>(kWidth));
  const auto row_bytes = static_cast<size_t>(kWidth / type->elements * type->bytes);
  quant::BlockParts parts;
  for (int64_t row = rows.row_begin; row < rows.row_end; ++row) {
    const std::byte* const bytes = put.bytes.data() + static_cast<size_t>(row) * row_bytes;
    quant::decode_blocks(*type, bytes, 0, kWidth, expected.data());
    for (int64_t col = 0; col < kWidth; ++col) {
      if (col % type->elements == 0) {
        type->take_apart(bytes + col / type->elements * type->bytes, parts);
      }
      if (!std::isfinite(2 * parts.scales[col % type->elements / type->group])) continue;
      const auto at = static_cast<size_t>((row - rows.row_begin) * kWidth + col);
      promise(same_number((*values)[at], expected[static_cast<size_t>(col)]));
    }
  }
}

// Rows of codes, scales and offsets, whole and from a column on.
void check_rows(FuzzInput& input, const PutMatrix& put, const MoeSpec& spec,
                const WeightSource& source) {
  const auto begin = static_cast<int64_t>(input.below(static_cast<size_t>(kWidth - kRowsRead)));
  for (const WeightPlane plane : {WeightPlane::kWeights, WeightPlane::kScale, WeightPlane::kZero}) {
    const WeightId id = put.id.with(plane);
    const WeightInfo info = source.describe(id);
    if (info.count == 0) continue;
    const WeightBlock rows{begin, begin + kRowsRead, 0, info.cols};
    const auto whole = read_weight(source, id, put.expert, rows);
    promise(whole.has_value());
    const int64_t col = static_cast<int64_t>(input.byte()) % info.cols;
    const WeightBlock part{begin, begin + kRowsRead, col, info.cols};
    const auto slice = read_weight(source, id, put.expert, part);
    promise(slice.has_value());
    promise(is_part(*whole, *slice, {.rows = kRowsRead, .cols = info.cols, .dtype = info.dtype},
                    {0, kRowsRead, col, info.cols}));
  }
  check_values(put, spec, source, {begin, begin + kRowsRead, 0, kWidth});
}

MoeSpec layer_of(FuzzInput& input) {
  MoeSpec spec;
  spec.num_experts = kExperts;
  spec.top_k = 1;
  spec.hidden_size = kWidth;
  spec.intermediate_size = kWidth;
  spec.activation = {.name = "silu"};
  spec.weight_dtype = DType::kF32;
  if (input.below(2) == 1) {
    spec.shared.mode = SharedMode::kAdd;
    spec.shared.intermediate_size = kWidth;
  }
  return spec;
}

void check_layer(FuzzInput& input) {
  const MoeSpec spec = layer_of(input);
  const std::vector<std::string_view> types = all_types();
  GgufBlocks blocks(spec);
  std::deque<PutMatrix> puts;
  const auto put = [&](WeightId id, std::string_view type, int64_t rows) {
    PutMatrix& made = puts.emplace_back(PutMatrix{.id = id, .type = type, .bytes = {}});
    made.bytes.resize(static_cast<size_t>(rows) * gguf_row_bytes(type, kWidth));
    fill_from(input.rest(), 11 * puts.size(), made.bytes);
    blocks.put(id, 0, type, made.bytes);
  };
  std::array<std::string_view, 6> chosen;
  for (std::string_view& type : chosen) type = types[input.below(types.size())];
  put(weights::kGate, chosen[0], kWidth);
  put(weights::kUp, chosen[1], kWidth);
  put(weights::kDown, chosen[2], kWidth);
  if (spec.shared.intermediate_size > 0) {
    put(weights::kSharedGate, chosen[3], kWidth);
    put(weights::kSharedUp, chosen[4], kWidth);
    put(weights::kSharedDown, chosen[5], kWidth);
  }
  std::vector<std::byte> router(static_cast<size_t>(kExperts) * gguf_row_bytes("F32", kWidth));
  blocks.put(weights::kRouter, 0, "F32", router);
  const MoeSpec coded = blocks.spec();
  const auto source = blocks.source();
  for (const PutMatrix& made : puts) check_rows(input, made, coded, *source);
}

}  // namespace

void fuzz_gguf_blocks(std::span<const std::byte> bytes) {
  FuzzInput input(bytes);
  const size_t kind = input.below(64);
  const auto known = quant::block_types();
  expect_value_or_error([&] {
    if (kind >= 56) {
      check_layer(input);
    } else if (kind >= 48) {
      check_encoding(input);
    } else {
      check_decoding(input, known[input.below(known.size())]);
    }
  });
}

}  // namespace conclave::testing
