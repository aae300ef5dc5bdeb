#include "checkpoint/gguf/source.h"

#include "checkpoint/block_reader.h"
#include "core/checked.h"
#include "core/weight_types.h"
#include "quant/gguf/block_type.h"
#include "quant/planes.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace conclave::inline v0::checkpoint {
namespace {

int64_t bytes_of_row(const io::GgufType& type, int64_t cols) {
  return cols / type.block_elements * type.block_bytes;
}

}  // namespace

std::vector<std::byte> GgufSource::read_rows(const GgufMatrix& matrix, int64_t cols, int64_t begin,
                                             int64_t end) const {
  const int64_t row_bytes = bytes_of_row(*matrix.place.tensor->type, cols);
  std::vector<std::byte> rows(static_cast<size_t>((end - begin) * row_bytes));
  const auto offset = static_cast<uint64_t>((matrix.first_row + begin) * row_bytes);
  if (verifier_ != nullptr) verifier_->check(*matrix.place.tensor, offset, rows.size());
  matrix.place.read(offset, rows);
  return rows;
}

WeightId GgufSource::matrix_of(WeightId id) {
  return quant::is_code_plane(id.plane()) ? id.with(WeightPlane::kWeights) : id;
}

const GgufMatrix& GgufSource::stored(WeightId id, int64_t expert) const {
  const std::vector<GgufMatrix>& matrices = layer_.stored[matrix_of(id)].matrices;
  if (expert >= 0 && expert < static_cast<int64_t>(matrices.size())) {
    return matrices[static_cast<size_t>(expert)];
  }
  throw Error(ErrorCode::kInvalidArgument,
              {.what = fmt::format("layer {} has no such {} matrix", layer_.index, to_string(id)),
               .tensor = "expert",
               .found = std::to_string(expert),
               .limit = fmt::format("{} matrices", matrices.size())});
}

DType GgufSource::type_of(WeightId id) const {
  if (id.plane() == WeightPlane::kWeights) {
    switch (*id.mlp()) {
      case WeightMlp::kRouted:
        return form_.routed;
      case WeightMlp::kShared:
        return form_.shared;
      case WeightMlp::kResidual:
        return form_.residual;
    }
  }
  return plain_type(*layer_.stored[id].matrices.front().place.tensor->type).value_or(DType::kF32);
}

WeightInfo GgufSource::describe(WeightId id) const {
  const GgufStored& matrices = layer_.stored[matrix_of(id)];
  const auto count = static_cast<int64_t>(matrices.matrices.size());
  if (count == 0) return {};
  if (!quant::is_code_plane(id.plane())) {
    return {.count = count, .rows = matrices.rows, .cols = matrices.cols, .dtype = type_of(id)};
  }
  const bool has_plane =
      id.plane() == WeightPlane::kScale ||
      (id.plane() == WeightPlane::kZero && form_.quant.zeros != WeightZero::kNone);
  if (!has_plane || is_plain(type_of(matrix_of(id)))) return {};
  return {.count = count,
          .rows = matrices.rows,
          .cols = ceil_div(matrices.cols, form_.quant.block_cols),
          .dtype = DType::kF32};
}

float GgufSource::factor_of(WeightId matrix, int64_t expert) const {
  if (matrix.mlp() != WeightMlp::kRouted) return 1;
  const GgufMatrix& factors = matrix == weights::kGate ? layer_.gate_factor
                              : matrix == weights::kUp ? layer_.up_factor
                                                       : layer_.down_factor;
  if (!factors.place) return 1;
  const std::vector<std::byte> row = read_rows(factors, layer_.num_experts, 0, 1);
  float factor = 0;
  float_rows(*factors.place.tensor->type, 1)
      ->read(row.data(), expert, expert + 1, static_cast<std::byte*>(static_cast<void*>(&factor)));
  return factor;
}

std::unique_ptr<RowReader> GgufSource::make_rows(WeightId id, int64_t expert, DType dtype,
                                                 const io::GgufType& type) const {
  const quant::BlockType* blocks = quant::find_block_type(type.name);
  const int64_t group = form_.quant.block_cols;
  if (id.plane() == WeightPlane::kScale) {
    return scale_rows(*blocks, type_of(matrix_of(id)), group, factor_of(matrix_of(id), expert));
  }
  if (id.plane() == WeightPlane::kZero) {
    const DType codes = type_of(matrix_of(id));
    return offset_rows(*blocks, codes, group, factor_of(matrix_of(id), expert));
  }
  if (!is_plain(dtype) && blocks != nullptr) return code_rows(*blocks, dtype);
  const float factor = id.plane() == WeightPlane::kWeights ? factor_of(id, expert) : 1;
  if (plain_type(type) == dtype && factor == 1) return same_rows(dtype);
  return float_rows(type, factor);
}

void GgufSource::read(WeightId id, int64_t expert, const WeightBlock& block,
                      std::span<std::byte> destination) const {
  const WeightId matrix_id = matrix_of(id);
  const GgufMatrix& matrix = stored(id, expert);
  const WeightInfo info = describe(id);
  check_block(info, block, destination.size());
  if (destination.empty()) return;
  const io::GgufType& type = *matrix.place.tensor->type;
  const std::unique_ptr<RowReader> rows = make_rows(id, expert, info.dtype, type);
  const int64_t cols = layer_.stored[matrix_id].cols;
  const std::vector<std::byte> stored_rows =
      read_rows(matrix, cols, block.row_begin, block.row_end);
  const int64_t row_bytes = bytes_of_row(type, cols);
  const int64_t out_bytes = packed_bytes(info.dtype, block.col_end - block.col_begin);
  for (int64_t row = 0; row < block.row_end - block.row_begin; ++row) {
    rows->read(stored_rows.data() + row * row_bytes, block.col_begin, block.col_end,
               destination.data() + row * out_bytes);
  }
}

ConstTensorView GgufSource::view(WeightId id, int64_t expert) const {
  if (quant::is_code_plane(id.plane())) return {};
  const GgufMatrix& matrix = stored(id, expert);
  const WeightInfo info = describe(id);
  const io::GgufType& type = *matrix.place.tensor->type;
  if (plain_type(type) != info.dtype) return {};
  const std::span<const std::byte> tensor = matrix.place.in_memory();
  if (tensor.empty()) return {};
  const std::byte* const data = tensor.data() + matrix.first_row * bytes_of_row(type, info.cols);
  // Tensors of a file are aligned, and those that a caller keeps need not be.
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(byte_size(info.dtype)) != 0) {
    return {};
  }
  if (id.plane() == WeightPlane::kWeights && factor_of(id, expert) != 1) return {};
  return {.data = data, .dtype = info.dtype, .shape = {info.rows, info.cols}};
}

void GgufSource::release(WeightId id, int64_t expert, const WeightBlock& block) const {
  const ConstTensorView whole = view(id, expert);
  const GgufMatrix& matrix = stored(id, expert);
  if (whole.empty() || !matrix.place.is_in_file()) return;
  const ByteRange range = bytes_of_block(whole, block);
  const io::GgufType& type = *matrix.place.tensor->type;
  const auto first = static_cast<uint64_t>(matrix.first_row * bytes_of_row(type, whole.shape[1]));
  io::GgufFile::release({matrix.place.part, matrix.place.tensor}, first + range.begin,
                        range.size());
}

std::string GgufSource::locate(WeightId id, int64_t expert) const {
  const GgufMatrix& matrix = stored(id, expert);
  std::string text = matrix.place.name();
  if (layer_.stored[matrix_of(id)].matrices.size() > 1 && layer_.layout != "per_expert") {
    text += fmt::format("[{}]", expert);
  }
  return text;
}

}  // namespace conclave::inline v0::checkpoint
