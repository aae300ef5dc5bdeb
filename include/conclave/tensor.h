// Shapes, non-owning views and the owning tensor. A view never frees; a Tensor does.
#pragma once

#include "conclave/dtype.h"
#include "conclave/version.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>

namespace conclave::inline v0 {

inline constexpr int kMaxRank = 8;

// Up to kMaxRank dimensions, each >= 0. Throws Error(kShape) beyond either limit.
class CONCLAVE_API Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);
  explicit Shape(std::span<const int64_t> dims);

  int rank() const noexcept { return rank_; }
  int64_t operator[](int axis) const noexcept { return dims_[static_cast<size_t>(axis)]; }
  std::span<const int64_t> dims() const noexcept { return {dims_.data(), size_t(rank_)}; }
  // Product of all dimensions; 1 for rank 0. Throws Error(kSizeOverflow).
  int64_t num_elements() const;
  std::string to_string() const;  // "[128, 2048]"
  friend bool operator==(const Shape&, const Shape&) = default;

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

// Bytes of a dense tensor, in checked 64-bit arithmetic. Throws Error(kSizeOverflow), or
// Error(kShape) if a sub-byte type does not fill whole bytes.
CONCLAVE_API size_t dense_bytes(DType dtype, const Shape& shape);

// The memory that a pointer points into; kDevice is memory of the context's device.
enum class MemoryKind : uint8_t { kHost, kDevice };

// Read-only view. Rows (the last axis) are dense; `row_stride` is the distance between consecutive
// rows in elements, 0 meaning dense. Only rank-2 views may be strided.
struct ConstTensorView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;
  int64_t row_stride = 0;

  bool empty() const noexcept { return data == nullptr; }
};

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;
  int64_t row_stride = 0;

  bool empty() const noexcept { return data == nullptr; }
  operator ConstTensorView() const { return {data, dtype, shape, row_stride}; }
};

// Owns 64-byte aligned, zero-initialised host memory. Move only. Throws Error(kOutOfMemory).
class CONCLAVE_API Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, Shape shape);

  TensorView view() noexcept { return {data_.get(), dtype_, shape_, 0}; }
  ConstTensorView view() const noexcept { return {data_.get(), dtype_, shape_, 0}; }
  ConstTensorView const_view() const noexcept { return view(); }
  DType dtype() const noexcept { return dtype_; }
  const Shape& shape() const noexcept { return shape_; }
  size_t size_bytes() const noexcept { return size_bytes_; }
  // T must have the size of the dtype's element.
  template <class T>
  T* as() noexcept {
    return static_cast<T*>(static_cast<void*>(data_.get()));
  }
  template <class T>
  const T* as() const noexcept {
    return static_cast<const T*>(static_cast<const void*>(data_.get()));
  }

 private:
  struct Free {
    void operator()(std::byte* data) const noexcept;
  };
  std::unique_ptr<std::byte[], Free> data_;
  DType dtype_ = DType::kF32;
  Shape shape_;
  size_t size_bytes_ = 0;
};

// Element conversion between f32, f64, f16 and bf16 (round to nearest even; NaN stays NaN).
// Shapes must agree. Throws Error(kDType) or Error(kShape).
CONCLAVE_API void convert(const ConstTensorView& from, const TensorView& to);

}  // namespace conclave::inline v0
