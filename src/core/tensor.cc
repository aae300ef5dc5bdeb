#include "conclave/tensor.h"

#include "core/checked.h"
#include "core/float_convert.h"

#include "conclave/error.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace conclave::inline v0 {
namespace {

constexpr std::align_val_t kAlignment{64};

[[noreturn]] void throw_overflow(DType dtype, const Shape& shape) {
  throw Error(ErrorCode::kSizeOverflow,
              {.what = "the size of a tensor does not fit 63 bits",
               .found = std::string(to_string(dtype)) + " " + shape.to_string()});
}

double load_element(const void* row, DType dtype, int64_t index) {
  const auto* bytes = static_cast<const std::byte*>(row) + index * byte_size(dtype);
  const auto load = [bytes]<class T>(T) {
    T value;
    std::memcpy(&value, bytes, sizeof(T));
    return value;
  };
  if (dtype == DType::kF32) return load(float{});
  if (dtype == DType::kF64) return load(double{});
  if (dtype == DType::kBF16) return bf16_to_float(load(uint16_t{}));
  return f16_to_float(load(uint16_t{}));
}

void store_element(void* row, DType dtype, int64_t index, double value) {
  auto* bytes = static_cast<std::byte*>(row) + index * byte_size(dtype);
  const auto store = [bytes](auto element) { std::memcpy(bytes, &element, sizeof(element)); };
  if (dtype == DType::kF32) return store(static_cast<float>(value));
  if (dtype == DType::kF64) return store(value);
  if (dtype == DType::kBF16) return store(double_to_bf16(value));
  store(double_to_f16(value));
}

bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kF16 ||
         dtype == DType::kBF16;
}

// Types that loading weights converts, without a look at the type for each element.
bool widen_row(const std::byte* source, DType dtype, int64_t count, std::byte* target) {
  const auto widen = [&](auto value_of) {
    for (int64_t i = 0; i < count; ++i) {
      uint16_t bits;
      std::memcpy(&bits, source + i * 2, sizeof(bits));
      const float value = value_of(bits);
      std::memcpy(target + i * 4, &value, sizeof(value));
    }
    return true;
  };
  if (dtype == DType::kBF16) return widen([](uint16_t bits) { return bf16_to_float(bits); });
  if (dtype == DType::kF16) return widen([](uint16_t bits) { return f16_to_float(bits); });
  if (dtype != DType::kF32) return false;
  std::memmove(target, source, static_cast<size_t>(count) * sizeof(float));
  return true;
}

}  // namespace

Shape::Shape(std::initializer_list<int64_t> dims) : Shape(std::span(dims.begin(), dims.size())) {}

Shape::Shape(std::span<const int64_t> dims) {
  if (dims.size() > size_t{kMaxRank}) {
    throw Error(ErrorCode::kShape, {.what = "too many dimensions",
                                    .found = std::to_string(dims.size()),
                                    .limit = std::to_string(kMaxRank)});
  }
  for (const int64_t dim : dims) {
    if (dim < 0) {
      throw Error(ErrorCode::kShape,
                  {.what = "a negative dimension", .found = std::to_string(dim)});
    }
  }
  std::ranges::copy(dims, dims_.begin());
  rank_ = static_cast<int>(dims.size());
}

int64_t Shape::num_elements() const {
  int64_t product = 1;
  for (const int64_t dim : dims()) {
    const auto next = checked_mul(product, dim);
    if (!next) {
      throw Error(
          ErrorCode::kSizeOverflow,
          {.what = "the element count of a shape does not fit 63 bits", .found = to_string()});
    }
    product = *next;
  }
  return product;
}

std::string Shape::to_string() const {
  std::string text = "[";
  for (const int64_t dim : dims()) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(dim);
  }
  return text + "]";
}

size_t dense_bytes(DType dtype, const Shape& shape) {
  const auto bits = checked_mul(shape.num_elements(), bit_size(dtype));
  if (!bits) throw_overflow(dtype, shape);
  if (*bits % 8 != 0) {
    throw Error(ErrorCode::kShape,
                {.what = "a sub-byte tensor does not fill whole bytes",
                 .found = std::string(to_string(dtype)) + " " + shape.to_string()});
  }
  return static_cast<size_t>(*bits / 8);
}

Tensor::Tensor(DType dtype, Shape shape)
    : dtype_(dtype), shape_(shape), size_bytes_(dense_bytes(dtype, shape)) {
  // Allocates at least one byte, so that a tensor without elements still has an address.
  const size_t bytes = std::max<size_t>(size_bytes_, 1);
  auto* data = static_cast<std::byte*>(::operator new[](bytes, kAlignment, std::nothrow));
  if (data == nullptr) {
    throw Error(ErrorCode::kOutOfMemory,
                {.what = "no memory for a tensor",
                 .expected = std::to_string(bytes) + " bytes for " +
                             std::string(conclave::to_string(dtype)) + " " + shape.to_string()});
  }
  std::memset(data, 0, bytes);
  data_.reset(data);
}

void Tensor::Free::operator()(std::byte* data) const noexcept {
  ::operator delete[](data, kAlignment);
}

void convert(const ConstTensorView& from, const TensorView& to) {
  for (const DType dtype : {from.dtype, to.dtype}) {
    if (!is_float(dtype)) {
      throw Error(ErrorCode::kDType, {.what = "cannot convert this element type",
                                      .expected = "F32, F64, F16 or BF16",
                                      .found = std::string(to_string(dtype))});
    }
  }
  if (from.shape != to.shape) {
    throw Error(ErrorCode::kShape, {.what = "conversion between different shapes",
                                    .expected = from.shape.to_string(),
                                    .found = to.shape.to_string()});
  }
  const int rank = from.shape.rank();
  const int64_t cols = rank > 0 ? from.shape[rank - 1] : 1;
  const int64_t rows = cols > 0 ? from.shape.num_elements() / cols : 0;
  const int64_t from_stride = (from.row_stride != 0 ? from.row_stride : cols);
  const int64_t to_stride = (to.row_stride != 0 ? to.row_stride : cols);
  for (int64_t row = 0; row < rows; ++row) {
    const auto* source =
        static_cast<const std::byte*>(from.data) + row * from_stride * byte_size(from.dtype);
    auto* target = static_cast<std::byte*>(to.data) + row * to_stride * byte_size(to.dtype);
    if (to.dtype == DType::kF32 && widen_row(source, from.dtype, cols, target)) continue;
    for (int64_t col = 0; col < cols; ++col) {
      store_element(target, to.dtype, col, load_element(source, from.dtype, col));
    }
  }
}

}  // namespace conclave::inline v0
