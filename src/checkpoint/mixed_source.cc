#include "checkpoint/mixed_source.h"

#include "checkpoint/block_reader.h"
#include "core/code_bits.h"
#include "core/weight_types.h"
#include "quant/code_meaning.h"
#include "quant/weight_block.h"
#include "quant/weight_format.h"

#include "conclave/error.h"
#include "conclave/quantise.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace conclave::inline v0::checkpoint {
namespace {

std::span<float> as_floats(std::span<std::byte> bytes) {
  return {static_cast<float*>(static_cast<void*>(bytes.data())), bytes.size() / sizeof(float)};
}

// Columns of the matrix that share a scale.
int64_t group_cols(const MatrixMeaning& meaning, const WeightInfo& matrix) {
  return quant::plane_of(WeightPlane::kScale, meaning.element, meaning.quant, matrix.rows,
                         matrix.cols)
      .block_cols;
}

}  // namespace

MixedSource::MixedSource(const TensorTable& table, const TensorData& data, const LayerMap& layer,
                         const Verifier* verifier)
    : layer_(layer), rest_(table, data, layer, verifier) {
  for (const LayerMap& part : layer.parts) {
    parts_.push_back(std::make_unique<LayerSource>(table, data, part, verifier));
  }
  whole_routed_ = find_whole(WeightMlp::kRouted);
  whole_shared_ = find_whole(WeightMlp::kShared);
}

const LayerSource* MixedSource::find_whole(WeightMlp mlp) const {
  const LayerSource* found = nullptr;
  for (const WeightMatrix matrix : {WeightMatrix::kGate, WeightMatrix::kUp, WeightMatrix::kDown}) {
    const WeightId id{mlp, matrix};
    for (int64_t expert = 0; expert < layer_.stored[id].info.count; ++expert) {
      const Stored from = stored(id, expert);
      if (found != nullptr && found != &from.source) return nullptr;
      if (from.meaning != wanted(id)) return nullptr;
      found = &from.source;
    }
  }
  return found;
}

const LayerSource* MixedSource::whole_part(WeightId id) const {
  if (!is_of_experts(id)) return &rest_;
  return id.mlp() == WeightMlp::kRouted ? whole_routed_ : whole_shared_;
}

bool MixedSource::is_of_experts(WeightId id) {
  return id.mlp() == WeightMlp::kRouted || id.mlp() == WeightMlp::kShared;
}

size_t MixedSource::part_of(WeightId matrix, int64_t expert) const {
  for (size_t part = 0; part < parts_.size(); ++part) {
    const auto& matrices = layer_.parts[part].stored[matrix].matrices;
    const bool is_there = expert >= 0 && expert < static_cast<int64_t>(matrices.size()) &&
                          matrices[static_cast<size_t>(expert)].tensor >= 0;
    if (is_there) return part;
  }
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "the layer has no such matrix",
               .tensor = to_string(matrix),
               .found = "expert " + std::to_string(expert),
               .limit = std::to_string(layer_.stored[matrix].info.count) + " matrices"});
}

MixedSource::Stored MixedSource::stored(WeightId matrix, int64_t expert) const {
  const size_t part = part_of(matrix, expert);
  const DType element = parts_[part]->describe(matrix).dtype;
  const QuantSpec quant = is_plain(element) ? QuantSpec{} : layer_.parts[part].quant;
  return {.source = *parts_[part], .meaning = {.element = element, .quant = quant}};
}

MatrixMeaning MixedSource::wanted(WeightId id) const {
  const DType element = layer_.stored[id.with(WeightPlane::kWeights)].info.dtype;
  return {.element = element, .quant = is_plain(element) ? QuantSpec{} : layer_.quant};
}

std::optional<quant::PlaneShape> MixedSource::plane_of(WeightId id) const {
  const WeightInfo& matrix = layer_.stored[id.with(WeightPlane::kWeights)].info;
  const MatrixMeaning meaning = wanted(id);
  for (const quant::PlaneShape& plane :
       quant::planes_of(meaning.element, meaning.quant, matrix.rows, matrix.cols)) {
    if (plane.plane == *id.plane()) return plane;
  }
  return std::nullopt;
}

WeightInfo MixedSource::describe(WeightId id) const {
  if (const LayerSource* const whole = whole_part(id)) return whole->describe(id);
  const WeightInfo& matrix = layer_.stored[id.with(WeightPlane::kWeights)].info;
  if (id.plane() == WeightPlane::kWeights || matrix.count == 0) return matrix;
  if (id.plane() == WeightPlane::kBias) {
    const bool there =
        std::ranges::any_of(parts_, [&](const auto& part) { return part->describe(id).count > 0; });
    return {.count = there ? matrix.count : 0, .rows = 1, .cols = matrix.rows};
  }
  const auto plane = plane_of(id);
  if (!plane) return {};
  const bool is_index = plane->type == quant::PlaneType::kIndex;
  return {.count = matrix.count,
          .rows = plane->rows,
          .cols = plane->cols,
          .dtype = is_index ? DType::kI32 : DType::kF32};
}

void MixedSource::read(WeightId id, int64_t expert, const WeightBlock& block,
                       std::span<std::byte> destination) const {
  if (const LayerSource* const whole = whole_part(id)) {
    return whole->read(id, expert, block, destination);
  }
  check_block(describe(id), block, destination.size());
  if (destination.empty()) return;
  if (quant::is_by_column(*id.plane())) return read_columns(id, expert, block, destination);
  switch (*id.plane()) {
    case WeightPlane::kWeights:
      return read_matrix(id, expert, block, destination);
    case WeightPlane::kBias:
    case WeightPlane::kInputScale:
      return read_floats(id, expert, block, as_floats(destination));
    default:
      return read_numbers(id, expert, block, as_floats(destination));
  }
}

void MixedSource::read_matrix(WeightId matrix, int64_t expert, const WeightBlock& block,
                              std::span<std::byte> destination) const {
  const Stored from = stored(matrix, expert);
  const DType type = wanted(matrix).element;
  if (from.meaning.element == type) return from.source.read(matrix, expert, block, destination);
  if (!is_plain(type)) return read_codes(from, matrix, expert, block, destination);
  read_values(from.meaning.quant, from.source, matrix, expert, block, as_floats(destination));
}

void MixedSource::read_codes(const Stored& from, WeightId matrix, int64_t expert,
                             const WeightBlock& block, std::span<std::byte> destination) const {
  const DType type = wanted(matrix).element;
  const quant::CodeBook& narrow = *quant::format_of(from.meaning.element).codes;
  const quant::CodeBook& wide = *quant::format_of(type).codes;
  std::array<uint8_t, 256> codes{};
  for (int code = 0; code < 1 << bit_size(narrow.element); ++code) {
    const auto narrow_code = static_cast<uint8_t>(code);
    codes[narrow_code] = wide.encode(narrow.decode(narrow_code));
  }
  const int64_t cols = block.col_end - block.col_begin;
  const int64_t rows = block.row_end - block.row_begin;
  const int64_t stored_bytes = packed_bytes(narrow.element, cols);
  const int64_t row_bytes = packed_bytes(type, cols);
  std::vector<std::byte> stored(static_cast<size_t>(rows * stored_bytes));
  from.source.read(matrix, expert, block, stored);
  for (int64_t row = 0; row < rows; ++row) {
    const std::byte* const line = stored.data() + row * stored_bytes;
    std::byte* const out = destination.data() + row * row_bytes;
    for (int64_t col = 0; col < cols; ++col) {
      set_code(out, col, bit_size(type), codes[code_at(line, col, bit_size(narrow.element))]);
    }
  }
}

void MixedSource::read_numbers(WeightId id, int64_t expert, const WeightBlock& block,
                               std::span<float> numbers) const {
  const WeightId matrix = id.with(WeightPlane::kWeights);
  const Stored from = stored(matrix, expert);
  const WeightInfo info = describe(matrix);
  const quant::PlaneShape plane = *plane_of(id);
  const int64_t own_cols = group_cols(from.meaning, info);
  const bool zeros = id.plane() == WeightPlane::kZero;
  const int64_t cols = block.col_end - block.col_begin;
  for (int64_t row = block.row_begin; row < block.row_end; ++row) {
    const int64_t of_matrix = row * plane.block_rows;
    const CodeMeaning meaning = load_meaning(from.meaning.quant, from.source, matrix, expert,
                                             {of_matrix, of_matrix + 1, 0, info.cols});
    const std::vector<float>& values = zeros ? meaning.offsets : meaning.scales;
    for (int64_t i = 0; i < cols; ++i) {
      const int64_t group = (block.col_begin + i) * plane.block_cols / own_cols;
      const auto at = static_cast<size_t>((row - block.row_begin) * cols + i);
      numbers[at] = values.empty() ? 0 : values[static_cast<size_t>(group)];
    }
  }
}

void MixedSource::read_columns(WeightId id, int64_t expert, const WeightBlock& block,
                               std::span<std::byte> destination) const {
  const WeightId matrix = id.with(WeightPlane::kWeights);
  const Stored from = stored(matrix, expert);
  const WeightInfo info = describe(matrix);
  const CodeMeaning meaning =
      load_meaning(from.meaning.quant, from.source, matrix, expert,
                   {0, std::min<int64_t>(1, info.rows), block.col_begin, block.col_end});
  const auto columns = static_cast<size_t>(block.col_end - block.col_begin);
  if (id.plane() == WeightPlane::kColumnFactor) {
    std::ranges::fill(as_floats(destination), 1.0F);
    std::ranges::copy(meaning.factors, as_floats(destination).begin());
    return;
  }
  // A group of the file is several of the common form, with the same scale.
  const int64_t common = wanted(id).quant.block_cols;
  const int64_t each = group_cols(from.meaning, info) / common;
  for (size_t i = 0; i < columns; ++i) {
    const int64_t group = meaning.order.empty()
                              ? (block.col_begin + static_cast<int64_t>(i)) / common
                              : int64_t{meaning.order[i]} * each;
    const auto entry = static_cast<int32_t>(group);
    std::memcpy(destination.data() + i * sizeof(entry), &entry, sizeof(entry));
  }
}

void MixedSource::read_floats(WeightId id, int64_t expert, const WeightBlock& block,
                              std::span<float> numbers) const {
  const LayerSource& source = *parts_[part_of(id.with(WeightPlane::kWeights), expert)];
  BlockLoader loader(source);
  const BlockRequest request{.id = id, .expert = expert, .block = block};
  ConstTensorView view;
  loader.load({&request, 1}, {&view, 1});
  convert(view, {.data = numbers.data(), .dtype = DType::kF32, .shape = view.shape});
}

ConstTensorView MixedSource::view(WeightId id, int64_t expert) const {
  const LayerSource* const whole = whole_part(id);
  return whole != nullptr ? whole->view(id, expert) : ConstTensorView{};
}

std::string MixedSource::locate(WeightId id, int64_t expert) const {
  if (const LayerSource* const whole = whole_part(id)) return whole->locate(id, expert);
  const WeightId matrix = id.with(WeightPlane::kWeights);
  const size_t part = part_of(matrix, expert);
  const bool own = parts_[part]->describe(id).count > 0;
  return parts_[part]->locate(own ? id : matrix, expert);
}

std::unique_ptr<WeightSource> make_layer_source(const TensorTable& table, const TensorData& data,
                                                const LayerMap& layer, const Verifier* verifier) {
  if (layer.parts.empty()) return std::make_unique<LayerSource>(table, data, layer, verifier);
  return std::make_unique<MixedSource>(table, data, layer, verifier);
}

}  // namespace conclave::inline v0::checkpoint
