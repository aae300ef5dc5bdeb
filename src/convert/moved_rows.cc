#include "convert/moved_rows.h"

#include "conclave/gguf.h"
#include "conclave/tensor.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <span>

namespace conclave::inline v0::conversion {
namespace {

// Whole blocks of any type, and 512 KiB of values.
constexpr int64_t kPieceElements = int64_t{1} << 17;

using Values = std::vector<float>;

int64_t elements_of(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// A vector has rows of one value.
int64_t row_length(const SourceTensor& tensor) {
  return tensor.shape.size() < 2 ? 1 : tensor.shape.back();
}

// Plain types have one name in both containers.
Values values_of(const SourceModel& model, const SourceTensor& tensor, int64_t begin,
                 int64_t count) {
  std::vector<std::byte> bytes(gguf_row_bytes(tensor.type, count));
  // There is no row of nothing.
  const uint64_t offset = begin == 0 ? 0 : gguf_row_bytes(tensor.type, begin);
  model.read(tensor, offset, bytes);
  Values values(static_cast<size_t>(count));
  gguf_values(tensor.type, bytes, values);
  return values;
}

void put_row(std::span<const float> from, int64_t row, std::span<float> to, int64_t place,
             int64_t cols) {
  std::ranges::copy(from.subspan(static_cast<size_t>(row * cols), static_cast<size_t>(cols)),
                    to.begin() + place * cols);
}

Values in_pairs(const Values& head, int64_t cols) {
  const int64_t half = static_cast<int64_t>(head.size()) / cols / 2;
  Values out(head.size());
  for (int64_t row = 0; row < half; ++row) {
    put_row(head, row, out, 2 * row, cols);
    put_row(head, half + row, out, 2 * row + 1, cols);
  }
  return out;
}

Values in_halves(const Values& head, int64_t cols) {
  const int64_t half = static_cast<int64_t>(head.size()) / cols / 2;
  Values out(head.size());
  for (int64_t row = 0; row < half; ++row) {
    put_row(head, 2 * row, out, row, cols);
    put_row(head, 2 * row + 1, out, half + row, cols);
  }
  return out;
}

// Rows become columns.
Values turned(std::span<const float> matrix, int64_t cols) {
  const auto rows = static_cast<int64_t>(matrix.size()) / cols;
  Values out(matrix.size());
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      out[static_cast<size_t>(col * rows + row)] = matrix[static_cast<size_t>(row * cols + col)];
    }
  }
  return out;
}

// A head of each source, one behind the other.
Values head_values(const SourceModel& model, const MovedTensor& moved, const SourceTensor& tensor,
                   int64_t head) {
  const int64_t count = elements_of(tensor.shape) / moved.heads;
  return values_of(model, tensor, head * count, count);
}

Values ordered_head(const SourceModel& model, const MovedTensor& moved, int64_t head) {
  const SourceTensor& first = *moved.sources.front();
  Values values = head_values(model, moved, first, head);
  if (moved.alternates) {
    const Values others = head_values(model, moved, *moved.sources.back(), head);
    values.insert(values.end(), others.begin(), others.end());
    return in_pairs(values, 1);
  }
  const int64_t cols = row_length(first);
  const auto keys = static_cast<size_t>(moved.keys * cols);
  switch (moved.order) {
    case TrunkOrder::kPairs:
      return in_pairs(values, cols);
    case TrunkOrder::kHalves:
      return in_halves(values, cols);
    case TrunkOrder::kLatentKeys:
      return turned(std::span(values).first(keys), cols);
    case TrunkOrder::kLatentValues:
      return {values.begin() + static_cast<int64_t>(keys), values.end()};
    case TrunkOrder::kLatentBoth:
      break;
    case TrunkOrder::kSame:
      return values;
  }
  Values both = turned(values, cols);
  const Values more = head_values(model, moved, *moved.sources.back(), head);
  both.insert(both.end(), more.begin(), more.end());
  return both;
}

std::vector<std::byte> bytes_of(const Values& values, DType dtype) {
  const Shape shape = {static_cast<int64_t>(values.size())};
  std::vector<std::byte> bytes(dense_bytes(dtype, shape));
  convert({.data = values.data(), .dtype = DType::kF32, .shape = shape},
          {.data = bytes.data(), .dtype = dtype, .shape = shape});
  return bytes;
}

bool has_heads(const MovedTensor& moved) {
  return moved.order != TrunkOrder::kSame || moved.alternates;
}

}  // namespace

int64_t count_pieces(const PlannedTensor& tensor) {
  if (has_heads(*tensor.moved)) return tensor.moved->heads;
  return (elements_of(tensor.shape) + kPieceElements - 1) / kPieceElements;
}

std::vector<std::byte> read_piece(const SourceModel& source, const PlannedTensor& tensor,
                                  int64_t piece) {
  const MovedTensor& moved = *tensor.moved;
  const DType dtype = *parse_dtype(tensor.type);
  if (has_heads(moved)) return bytes_of(ordered_head(source, moved, piece), dtype);
  const int64_t begin = piece * kPieceElements;
  const int64_t count = std::min(kPieceElements, elements_of(tensor.shape) - begin);
  return bytes_of(values_of(source, *moved.sources.front(), begin, count), dtype);
}

}  // namespace conclave::inline v0::conversion
