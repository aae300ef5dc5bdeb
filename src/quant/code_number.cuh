// The numbers that codes of a byte are, on a device.
#pragma once

#include "quant/int8/int8.h"

#include "conclave/dtype.h"

#include <cstdint>
#include <cuda_fp8.h>

namespace conclave::inline v0::quant {

struct E4m3Number {
  static __device__ __forceinline__ float of(uint8_t code) {
    __nv_fp8_e4m3 number;
    number.__x = code;
    return static_cast<float>(number);
  }
};
struct Int8Number {
  static __device__ __forceinline__ float of(uint8_t code) {
    return static_cast<float>(static_cast<int8_t>(code));
  }
};

// Calls `use` with the type above that belongs to rows of these codes.
template <class Use>
void with_code_number(DType codes, Use use) {
  if (codes == Int8::kElement) return use(Int8Number{});
  use(E4m3Number{});
}

}  // namespace conclave::inline v0::quant
