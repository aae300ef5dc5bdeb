#include "checkpoint/layer_source.h"

#include "checkpoint/block_reader.h"
#include "core/weight_types.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

namespace conclave::inline v0::checkpoint {
namespace {

void read_elements(const TensorData& data, const MatrixLocation& matrix, const WeightBlock& block,
                   DType dtype, std::span<std::byte> destination) {
  const int64_t bits = bit_size(dtype);
  if (bits < 8) return read_codes(data, matrix, block, bits, destination);
  read_block(data, matrix, block, static_cast<size_t>(bits / 8), destination);
}

}  // namespace

const MatrixLocation& LayerSource::matrix_of(WeightId id, int64_t expert) const {
  const std::vector<MatrixLocation>& matrices = layer_.stored[id].matrices;
  if (expert < 0 || expert >= static_cast<int64_t>(matrices.size())) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = fmt::format("layer {} has no such {} matrix", layer_.index, to_string(id)),
                 .tensor = "expert",
                 .found = std::to_string(expert),
                 .limit = fmt::format("{} matrices", matrices.size())});
  }
  return matrices[static_cast<size_t>(expert)];
}

const PlaneReading* LayerSource::reading_of(const MatrixLocation& matrix) const {
  if (matrix.reading < 0) return nullptr;
  return &layer_.readings[static_cast<size_t>(matrix.reading)];
}

void LayerSource::read_decoded(const PlaneReading& reading, const MatrixLocation& matrix,
                               const WeightBlock& block, std::span<std::byte> destination) const {
  const int64_t slice = matrix.offset / reading.slice_elements;
  MatrixLocation inside = matrix;
  inside.offset %= reading.slice_elements;
  const SliceData data(planes_.slice(reading, slice));
  read_elements(data, inside, block, reading.dtype, destination);
}

void LayerSource::verify(const MatrixLocation& matrix, DType dtype) const {
  if (verifier_ == nullptr) return;
  verifier_->check(matrix.tensor, static_cast<uint64_t>(packed_bytes(dtype, matrix.offset)));
}

void LayerSource::read(WeightId id, int64_t expert, const WeightBlock& block,
                       std::span<std::byte> destination) const {
  const MatrixLocation& matrix = matrix_of(id, expert);
  const WeightInfo info = describe(id);
  check_block(info, block, destination.size());
  if (destination.empty()) return;
  const PlaneReading* const reading = reading_of(matrix);
  if (reading != nullptr && !reading->lies_in_place()) {
    return read_decoded(*reading, matrix, block, destination);
  }
  if (reading != nullptr && reading->row->convert != nullptr) {
    verify(matrix, info.dtype);
    const ConvertedData converted(data_, reading->row->convert);
    return read_elements(converted, matrix, block, info.dtype, destination);
  }
  const int64_t bits = bit_size(info.dtype);
  const int64_t first =
      matrix.offset + block.row_begin * matrix.row_stride + block.col_begin * matrix.col_stride;
  const auto first_byte = static_cast<uint64_t>(first * bits / 8);
  const int64_t rows = block.row_end - block.row_begin;
  const int64_t cols = block.col_end - block.col_begin;
  const bool dense = matrix.col_stride == 1 && (matrix.row_stride == cols || rows == 1) &&
                     first * bits % 8 == 0 && cols * bits % 8 == 0;
  if (dense && verifier_ != nullptr &&
      verifier_->is_block(matrix.tensor, first_byte, destination.size())) {
    read_verified(matrix.tensor, first_byte, destination);
    return;
  }
  verify(matrix, info.dtype);
  read_elements(data_, matrix, block, info.dtype, destination);
}

void LayerSource::read_verified(int32_t tensor, uint64_t offset,
                                std::span<std::byte> destination) const {
  data_.read(tensor, offset, destination);
  try {
    verifier_->check_bytes(tensor, offset, destination);
  } catch (const Error&) {
    // Damaged bytes are not handed out, not even along with an error.
    std::fill(destination.begin(), destination.end(), std::byte{0});
    throw;
  }
}

ConstTensorView LayerSource::view(WeightId id, int64_t expert) const {
  const MatrixLocation& matrix = matrix_of(id, expert);
  const WeightInfo info = describe(id);
  const PlaneReading* const reading = reading_of(matrix);
  const bool as_stored =
      reading == nullptr || (reading->lies_in_place() && reading->row->convert == nullptr);
  if (!as_stored || matrix.col_stride != 1 || matrix.row_stride < info.cols) return {};
  const auto mapped = data_.mapped(matrix.tensor);
  if (mapped.empty()) return {};
  const int64_t bits = bit_size(info.dtype);
  if (matrix.offset * bits % 8 != 0 || matrix.row_stride * bits % 8 != 0) return {};
  const std::byte* data = mapped.data() + matrix.offset * bits / 8;
  // The header before the data may have any length.
  const auto alignment = static_cast<uintptr_t>(ceil_div(bits, 8));
  if (reinterpret_cast<uintptr_t>(data) % alignment != 0) return {};
  verify(matrix, info.dtype);
  return {.data = data,
          .dtype = info.dtype,
          .shape = {info.rows, info.cols},
          .row_stride = matrix.row_stride != info.cols ? matrix.row_stride : 0};
}

void LayerSource::release(WeightId id, int64_t expert, const WeightBlock& block) const {
  const ConstTensorView whole = view(id, expert);
  if (whole.empty()) return;
  const ByteRange range = bytes_of_block(whole, block);
  const MatrixLocation& matrix = matrix_of(id, expert);
  const auto first = static_cast<uint64_t>(packed_bytes(whole.dtype, matrix.offset));
  data_.release(matrix.tensor, first + range.begin, range.size());
}

std::string LayerSource::locate(WeightId id, int64_t expert) const {
  const MatrixLocation& matrix = matrix_of(id, expert);
  std::string text = table_.name_of(matrix.tensor) + ": " + table_.info(matrix.tensor).name;
  const std::vector<MatrixLocation>& all = layer_.stored[id].matrices;
  const bool shared_tensor = all.size() > 1 && all[0].tensor == all[1].tensor;
  if (shared_tensor || table_.info(matrix.tensor).shape.size() > 2) {
    text += fmt::format("[{}]", expert);
  }
  return text;
}

}  // namespace conclave::inline v0::checkpoint
