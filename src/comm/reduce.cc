#include "comm/reduce.h"

#include <cstring>
#include <type_traits>

namespace conclave::inline v0::comm {
namespace {

template <class T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
  } else {
    return a + b;
  }
}

template <class T>
T greater(T a, T b) {
  const bool b_is_nan = b != b;
  return b > a || b_is_nan ? b : a;
}

template <class T>
void reduce_as(std::byte* accumulated, const std::byte* value, int64_t bytes, ReduceOp op) {
  const int64_t step = static_cast<int64_t>(sizeof(T));
  for (int64_t offset = 0; offset + step <= bytes; offset += step) {
    T a{};
    T b{};
    std::memcpy(&a, accumulated + offset, sizeof(T));
    std::memcpy(&b, value + offset, sizeof(T));
    const T result = op == ReduceOp::kSum ? add(a, b) : greater(a, b);
    std::memcpy(accumulated + offset, &result, sizeof(T));
  }
}

}  // namespace

bool is_reducible(DType dtype) noexcept {
  return dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kI32 ||
         dtype == DType::kI64;
}

void reduce_into(std::byte* accumulated, const std::byte* value, int64_t bytes, DType dtype,
                 ReduceOp op) noexcept {
  switch (dtype) {
    case DType::kF32:
      return reduce_as<float>(accumulated, value, bytes, op);
    case DType::kF64:
      return reduce_as<double>(accumulated, value, bytes, op);
    case DType::kI32:
      return reduce_as<int32_t>(accumulated, value, bytes, op);
    case DType::kI64:
      return reduce_as<int64_t>(accumulated, value, bytes, op);
    default:
      return;
  }
}

}  // namespace conclave::inline v0::comm
