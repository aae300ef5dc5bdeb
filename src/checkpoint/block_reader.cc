#include "checkpoint/block_reader.h"

#include "core/checked.h"
#include "core/code_bits.h"
#include "core/row_stride.h"
#include "core/weight_types.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace conclave::inline v0::checkpoint {
namespace {

// Lines that do not follow each other densely are read in windows of this size and picked apart.
constexpr int64_t kWindowBytes = int64_t{1} << 20;
// Lines that are further apart than this many times their length are read one by one.
constexpr int64_t kMaxGapRatio = 8;

// A block as it lies in the tensor: `count` lines, `stride` elements apart, each with `length`
// elements that are `step` apart.
struct Lines {
  int64_t first = 0;
  int64_t count = 0;
  int64_t length = 0;
  int64_t stride = 0;
  int64_t step = 1;

  int64_t span() const { return (length - 1) * step + 1; }
};

// Element i of line n is written to n * line_stride + i * element_stride.
struct Target {
  std::byte* data = nullptr;
  int64_t line_stride = 0;
  int64_t element_stride = 0;
};

class LineReader {
 public:
  LineReader(const TensorData& data, int32_t tensor, size_t element_bytes)
      : data_(data), tensor_(tensor), element_bytes_(element_bytes) {}

  void read(int64_t first, std::span<std::byte> destination) const {
    data_.read(tensor_, static_cast<uint64_t>(first) * element_bytes_, destination);
  }

  // Calls take(line, data) for each line in order.
  template <class Take>
  void for_each_line(const Lines& lines, Take take) const {
    const auto bytes = static_cast<int64_t>(element_bytes_);
    const bool sparse = lines.stride > kMaxGapRatio * lines.span();
    const int64_t lines_per_window =
        sparse ? 1 : std::max<int64_t>(1, kWindowBytes / (lines.stride * bytes));
    std::vector<std::byte> window;
    for (int64_t line = 0; line < lines.count; line += lines_per_window) {
      const int64_t count = std::min(lines_per_window, lines.count - line);
      window.resize(static_cast<size_t>(((count - 1) * lines.stride + lines.span()) * bytes));
      read(lines.first + line * lines.stride, window);
      for (int64_t i = 0; i < count; ++i) take(line + i, window.data() + i * lines.stride * bytes);
    }
  }

 private:
  const TensorData& data_;
  int32_t tensor_;
  size_t element_bytes_;
};

template <class Element>
void pick(const LineReader& reader, const Lines& lines, const Target& target) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Element));
  reader.for_each_line(lines, [&](int64_t line, const std::byte* data) {
    std::byte* to = target.data + line * target.line_stride * kBytes;
    if (lines.step == 1 && target.element_stride == 1) {
      std::memcpy(to, data, static_cast<size_t>(lines.length * kBytes));
      return;
    }
    for (int64_t i = 0; i < lines.length; ++i) {
      std::memcpy(to + i * target.element_stride * kBytes, data + i * lines.step * kBytes,
                  sizeof(Element));
    }
  });
}

void pick_any(const LineReader& reader, const Lines& lines, const Target& target,
              size_t element_bytes) {
  switch (element_bytes) {
    case 1:
      return pick<uint8_t>(reader, lines, target);
    case 2:
      return pick<uint16_t>(reader, lines, target);
    case 4:
      return pick<uint32_t>(reader, lines, target);
    default:
      return pick<uint64_t>(reader, lines, target);
  }
}

}  // namespace

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
  const auto bytes = static_cast<size_t>((block.row_end - block.row_begin) *
                                         packed_bytes(info.dtype, block.col_end - block.col_begin));
  if (bytes != destination_bytes) {
    throw Error(ErrorCode::kShape, {.what = "the destination has another size than the block",
                                    .tensor = "destination",
                                    .expected = fmt::format("{} bytes", bytes),
                                    .found = fmt::format("{} bytes", destination_bytes)});
  }
}

ByteRange bytes_of_block(const ConstTensorView& whole, const WeightBlock& block) {
  if (block.row_begin >= block.row_end || block.col_begin >= block.col_end) return {};
  const int64_t stride = row_stride(whole);
  const int64_t bits = bit_size(whole.dtype);
  const int64_t first = block.row_begin * stride + block.col_begin;
  const int64_t last = (block.row_end - 1) * stride + block.col_end;
  return {.begin = static_cast<uint64_t>(first * bits / 8),
          .end = static_cast<uint64_t>(ceil_div(last * bits, 8))};
}

void read_codes(const TensorData& data, const MatrixLocation& matrix, const WeightBlock& block,
                int64_t bits, std::span<std::byte> destination) {
  const int64_t cols = block.col_end - block.col_begin;
  const auto out_bytes = static_cast<size_t>(ceil_div(cols * bits, 8));
  std::vector<std::byte> window;
  for (int64_t row = block.row_begin; row < block.row_end; ++row) {
    const int64_t first = matrix.offset + row * matrix.row_stride + block.col_begin;
    const int64_t skipped = first % codes_to_a_byte(bits);
    const int64_t first_byte = (first - skipped) * bits / 8;
    window.resize(static_cast<size_t>(ceil_div((first + cols) * bits, 8) - first_byte));
    data.read(matrix.tensor, static_cast<uint64_t>(first_byte), window);
    copy_codes(window.data(), skipped, cols, bits, destination.data());
    destination = destination.subspan(out_bytes);
  }
}

void read_block(const TensorData& data, const MatrixLocation& matrix, const WeightBlock& block,
                size_t element_bytes, std::span<std::byte> destination) {
  const LineReader reader(data, matrix.tensor, element_bytes);
  const int64_t rows = block.row_end - block.row_begin;
  const int64_t cols = block.col_end - block.col_begin;
  const int64_t first =
      matrix.offset + block.row_begin * matrix.row_stride + block.col_begin * matrix.col_stride;
  if (matrix.col_stride == 1 && (matrix.row_stride == cols || rows == 1)) {
    reader.read(first, destination);
    return;
  }
  // Lines run along the axis whose elements lie closer together.
  if (rows == 1 || matrix.col_stride < matrix.row_stride) {
    pick_any(reader,
             {.first = first,
              .count = rows,
              .length = cols,
              .stride = matrix.row_stride,
              .step = matrix.col_stride},
             {.data = destination.data(), .line_stride = cols, .element_stride = 1}, element_bytes);
    return;
  }
  pick_any(reader,
           {.first = first,
            .count = cols,
            .length = rows,
            .stride = matrix.col_stride,
            .step = matrix.row_stride},
           {.data = destination.data(), .line_stride = 1, .element_stride = cols}, element_bytes);
}

}  // namespace conclave::inline v0::checkpoint
