#include "checkpoint/layer_source.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace conclave::inline v0::checkpoint {
namespace {

// Lines that do not follow each other densely are read in windows of this size and picked apart.
constexpr int64_t kWindowBytes = int64_t{1} << 20;
// Further apart than this many times their length, lines are read one by one.
constexpr int64_t kMaxGapRatio = 8;

// A block as it lies in the file: lines of consecutive elements, `stride` elements apart.
struct Lines {
  int64_t first = 0;  // element of the tensor
  int64_t count = 0;
  int64_t length = 0;
  int64_t stride = 0;
};

void read_elements(const FileRange& from, int64_t first, std::span<std::byte> destination) {
  from.file.read(from.tensor, static_cast<uint64_t>(first) * from.element_bytes, destination);
}

// Calls take(line, data) for each line in order.
template <class Take>
void for_each_line(const FileRange& from, const Lines& lines, Take take) {
  const auto element_bytes = static_cast<int64_t>(from.element_bytes);
  const bool sparse = lines.stride > kMaxGapRatio * lines.length;
  const int64_t lines_per_window =
      sparse ? 1 : std::max<int64_t>(1, kWindowBytes / (lines.stride * element_bytes));
  std::vector<std::byte> window;
  for (int64_t line = 0; line < lines.count; line += lines_per_window) {
    const int64_t count = std::min(lines_per_window, lines.count - line);
    window.resize(static_cast<size_t>(((count - 1) * lines.stride + lines.length) * element_bytes));
    read_elements(from, lines.first + line * lines.stride, window);
    for (int64_t i = 0; i < count; ++i) {
      take(line + i, window.data() + i * lines.stride * element_bytes);
    }
  }
}

template <class Element>
void read_transposed(const FileRange& from, const Lines& lines, std::byte* destination) {
  for_each_line(from, lines, [&](int64_t line, const std::byte* data) {
    for (int64_t i = 0; i < lines.length; ++i) {
      std::memcpy(destination + (i * lines.count + line) * static_cast<int64_t>(sizeof(Element)),
                  data + i * static_cast<int64_t>(sizeof(Element)), sizeof(Element));
    }
  });
}

void read_rows(const FileRange& from, const Lines& lines, std::span<std::byte> destination) {
  if (lines.stride == lines.length || lines.count == 1) {
    read_elements(from, lines.first, destination);
    return;
  }
  const size_t line_bytes = static_cast<size_t>(lines.length) * from.element_bytes;
  for_each_line(from, lines, [&](int64_t line, const std::byte* data) {
    std::memcpy(destination.data() + static_cast<size_t>(line) * line_bytes, data, line_bytes);
  });
}

void read_columns(const FileRange& from, const Lines& lines, std::span<std::byte> destination) {
  switch (from.element_bytes) {
    case 1:
      return read_transposed<uint8_t>(from, lines, destination.data());
    case 2:
      return read_transposed<uint16_t>(from, lines, destination.data());
    case 4:
      return read_transposed<uint32_t>(from, lines, destination.data());
    default:
      return read_transposed<uint64_t>(from, lines, destination.data());
  }
}

void check_block(const WeightInfo& info, const WeightBlock& block, size_t destination_bytes) {
  const bool inside = 0 <= block.row_begin && block.row_begin <= block.row_end &&
                      block.row_end <= info.rows && 0 <= block.col_begin &&
                      block.col_begin <= block.col_end && block.col_end <= info.cols;
  if (!inside) {
    throw Error(ErrorCode::kShape,
                {.what = "the block lies outside the matrix",
                 .tensor = "block",
                 .found = fmt::format("rows {} to {}, columns {} to {}", block.row_begin,
                                      block.row_end, block.col_begin, block.col_end),
                 .limit = fmt::format("[{}, {}]", info.rows, info.cols)});
  }
  const auto bytes =
      static_cast<size_t>((block.row_end - block.row_begin) * (block.col_end - block.col_begin)) *
      static_cast<size_t>(byte_size(info.dtype));
  if (bytes != destination_bytes) {
    throw Error(ErrorCode::kShape, {.what = "the destination has another size than the block",
                                    .tensor = "destination",
                                    .expected = fmt::format("{} bytes", bytes),
                                    .found = fmt::format("{} bytes", destination_bytes)});
  }
}

}  // namespace

const MatrixLocation& LayerSource::matrix_of(WeightRole role, int64_t expert) const {
  const std::vector<MatrixLocation>& matrices = layer_.role(role).matrices;
  if (expert < 0 || expert >= static_cast<int64_t>(matrices.size())) {
    throw Error(
        ErrorCode::kInvalidArgument,
        {.what = fmt::format("layer {} has no such {} matrix", layer_.index, to_string(role)),
         .tensor = "expert",
         .found = std::to_string(expert),
         .limit = fmt::format("{} matrices", matrices.size())});
  }
  return matrices[static_cast<size_t>(expert)];
}

void LayerSource::verify(const MatrixLocation& matrix, DType dtype) const {
  if (verifier_ == nullptr) return;
  verifier_->check(matrix.tensor, static_cast<uint64_t>(matrix.offset * byte_size(dtype)));
}

void LayerSource::read(WeightRole role, int64_t expert, const WeightBlock& block,
                       std::span<std::byte> destination) const {
  const MatrixLocation& matrix = matrix_of(role, expert);
  const WeightInfo info = describe(role);
  check_block(info, block, destination.size());
  if (destination.empty()) return;
  const auto element_bytes = static_cast<size_t>(byte_size(info.dtype));
  const int64_t first =
      matrix.offset + block.row_begin * matrix.row_stride + block.col_begin * matrix.col_stride;
  const auto first_byte = static_cast<uint64_t>(first) * element_bytes;
  const StoredTensor& stored = shards_.tensors[static_cast<size_t>(matrix.tensor)];
  const FileRange from{.file = shards_.files[static_cast<size_t>(stored.shard)],
                       .tensor = *stored.info,
                       .element_bytes = element_bytes};
  const int64_t rows = block.row_end - block.row_begin;
  const int64_t cols = block.col_end - block.col_begin;
  const bool dense = matrix.col_stride == 1 && (matrix.row_stride == cols || rows == 1);
  if (dense && verifier_ != nullptr &&
      verifier_->is_block(matrix.tensor, first_byte, destination.size())) {
    read_verified(from, first, matrix.tensor, destination);
    return;
  }
  verify(matrix, info.dtype);
  if (matrix.col_stride == 1) {
    read_rows(from, {.first = first, .count = rows, .length = cols, .stride = matrix.row_stride},
              destination);
  } else {
    read_columns(from, {.first = first, .count = cols, .length = rows, .stride = matrix.col_stride},
                 destination);
  }
}

void LayerSource::read_verified(const FileRange& from, int64_t first, int32_t tensor,
                                std::span<std::byte> destination) const {
  read_elements(from, first, destination);
  try {
    verifier_->check_bytes(tensor, static_cast<uint64_t>(first) * from.element_bytes, destination);
  } catch (const Error&) {
    // Damaged bytes are not given away, not even beside an error.
    std::fill(destination.begin(), destination.end(), std::byte{0});
    throw;
  }
}

ConstTensorView LayerSource::view(WeightRole role, int64_t expert) const {
  const MatrixLocation& matrix = matrix_of(role, expert);
  const WeightInfo info = describe(role);
  if (matrix.col_stride != 1 || matrix.row_stride != info.cols) return {};
  const StoredTensor& stored = shards_.tensors[static_cast<size_t>(matrix.tensor)];
  const auto mapped = shards_.files[static_cast<size_t>(stored.shard)].mapped(*stored.info);
  if (mapped.empty()) return {};
  const std::byte* data = mapped.data() + matrix.offset * byte_size(info.dtype);
  // A header of any length may precede the data.
  const auto alignment = static_cast<uintptr_t>(byte_size(info.dtype));
  if (reinterpret_cast<uintptr_t>(data) % alignment != 0) return {};
  verify(matrix, info.dtype);
  return {.data = data, .dtype = info.dtype, .shape = {info.rows, info.cols}};
}

std::string LayerSource::locate(WeightRole role, int64_t expert) const {
  const MatrixLocation& matrix = matrix_of(role, expert);
  const StoredTensor& stored = shards_.tensors[static_cast<size_t>(matrix.tensor)];
  std::string text = shards_.names[static_cast<size_t>(stored.shard)] + ": " + stored.info->name;
  if (stored.info->shape.size() > 2) text += fmt::format("[{}]", expert);
  return text;
}

}  // namespace conclave::inline v0::checkpoint
