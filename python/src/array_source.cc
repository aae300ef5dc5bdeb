#include "array_source.h"

#include "conclave/error.h"

#include <algorithm>
#include <cstring>

namespace conclave::python {
namespace {

// Copies row by row if rows are dense, otherwise by small tiles, so that both sides stay in the
// cache.
template <class Element>
void gather(const std::byte* base, const MatrixArrays& arrays, const WeightBlock& block,
            std::byte* destination) {
  const auto* from = reinterpret_cast<const Element*>(base);
  auto* to = reinterpret_cast<Element*>(destination);
  const int64_t cols = block.col_end - block.col_begin;
  if (arrays.col_stride == 1) {
    for (int64_t row = block.row_begin; row < block.row_end; ++row, to += cols) {
      std::memcpy(to, from + row * arrays.row_stride + block.col_begin,
                  static_cast<size_t>(cols) * sizeof(Element));
    }
    return;
  }
  constexpr int64_t kTile = 32;
  for (int64_t row0 = block.row_begin; row0 < block.row_end; row0 += kTile) {
    const int64_t row1 = std::min(row0 + kTile, block.row_end);
    for (int64_t col0 = block.col_begin; col0 < block.col_end; col0 += kTile) {
      const int64_t col1 = std::min(col0 + kTile, block.col_end);
      for (int64_t col = col0; col < col1; ++col) {
        for (int64_t row = row0; row < row1; ++row) {
          to[(row - block.row_begin) * cols + col - block.col_begin] =
              from[row * arrays.row_stride + col * arrays.col_stride];
        }
      }
    }
  }
}

void flip(std::byte bits, std::span<std::byte> bytes) {
  if (bits == std::byte{0}) return;
  for (std::byte& byte : bytes) byte ^= bits;
}

// Copies rows of half bytes; a block may begin in the middle of one.
void gather_halves(const std::byte* base, const MatrixArrays& arrays, const WeightBlock& block,
                   std::byte* destination) {
  const int64_t cols = block.col_end - block.col_begin;
  const int64_t row_bytes = (cols + 1) / 2;
  for (int64_t row = block.row_begin; row < block.row_end; ++row, destination += row_bytes) {
    const std::byte* from = base + (row * arrays.row_stride + block.col_begin) / 2;
    if (block.col_begin % 2 == 0) {
      std::memcpy(destination, from, static_cast<size_t>(row_bytes));
      continue;
    }
    for (int64_t i = 0; i < row_bytes; ++i) {
      const bool has_upper = 2 * i + 1 < cols;
      destination[i] = from[i] >> 4 | (has_upper ? from[i + 1] << 4 : std::byte{0});
    }
  }
}

[[noreturn]] void refuse_flips(const MatrixArrays& arrays) {
  throw Error(ErrorCode::kUnsupported, {.what = "weights in device memory are used as they are",
                                        .tensor = arrays.argument,
                                        .expected = "signed bytes",
                                        .found = "unsigned bytes, 128 more than their values",
                                        .hint = "pass (w ^ 0x80).view(torch.int8)"});
}

[[noreturn]] void refuse_strides(const MatrixArrays& arrays) {
  throw Error(ErrorCode::kStride,
              {.what = "weights in device memory must have dense rows",
               .tensor = arrays.argument,
               .expected = "columns side by side, rows ascending",
               .found = "strides " + std::to_string(arrays.row_stride) + ", " +
                        std::to_string(arrays.col_stride),
               .hint = "pass a contiguous copy in the order [experts, rows, columns]"});
}

}  // namespace

ArraySource::ArraySource(const nb::dict& arrays, const MoeSpec& spec, const ArrayLayout& layout) {
  cut_weights(arrays, spec, layout, weights_);
  if (weights_.kept.empty()) return;
  device_ = weights_.kept.front().device();
  for (const Array& array : weights_.kept) array.require_device(device_);
}

bool ArraySource::is_here(WeightId id, int64_t expert) const {
  const std::vector<const std::byte*>& matrices = at(id).matrices;
  return expert >= 0 && expert < static_cast<int64_t>(matrices.size()) &&
         matrices[static_cast<size_t>(expert)] != nullptr;
}

const std::byte* ArraySource::matrix(WeightId id, int64_t expert) const {
  if (is_here(id, expert)) return at(id).matrices[static_cast<size_t>(expert)];
  throw Error(ErrorCode::kTensorMissing, {.what = "an expert has no weights here",
                                          .tensor = locate(id, expert),
                                          .found = std::to_string(expert)});
}

ConstTensorView ArraySource::view(WeightId id, int64_t expert) const {
  // The library also asks for other ranks' experts; read() reports to a caller that needs one of
  // them.
  if (!is_here(id, expert)) return {};
  const MatrixArrays& arrays = at(id);
  const std::byte* data = matrix(id, expert);
  const WeightInfo& info = arrays.info;
  if (arrays.flips != std::byte{0}) {
    if (device_.is_cuda) refuse_flips(arrays);
    return {};
  }
  const bool rows_are_dense = arrays.col_stride == 1 || info.cols <= 1;
  const bool rows_ascend = info.rows <= 1 || arrays.row_stride >= info.cols;
  if (!rows_are_dense || !rows_ascend) {
    if (device_.is_cuda) refuse_strides(arrays);
    return {};
  }
  const bool is_dense = info.rows <= 1 || arrays.row_stride == info.cols;
  return {.data = data,
          .dtype = info.dtype,
          .shape = {info.rows, info.cols},
          .row_stride = is_dense ? 0 : arrays.row_stride};
}

void ArraySource::read(WeightId id, int64_t expert, const WeightBlock& block,
                       std::span<std::byte> destination) const {
  const MatrixArrays& arrays = at(id);
  const std::byte* base = matrix(id, expert);
  if (device_.is_cuda) refuse_strides(arrays);
  if (bit_size(arrays.info.dtype) < 8) {
    return gather_halves(base, arrays, block, destination.data());
  }
  switch (byte_size(arrays.info.dtype)) {
    case 1:
      gather<uint8_t>(base, arrays, block, destination.data());
      return flip(arrays.flips, destination);
    case 2:
      return gather<uint16_t>(base, arrays, block, destination.data());
    case 4:
      return gather<uint32_t>(base, arrays, block, destination.data());
    default:
      return gather<uint64_t>(base, arrays, block, destination.data());
  }
}

std::string ArraySource::locate(WeightId id, int64_t expert) const {
  const MatrixArrays& arrays = at(id);
  if (arrays.argument.empty()) return to_string(id);
  return arrays.argument + ", expert " + std::to_string(expert);
}

}  // namespace conclave::python
