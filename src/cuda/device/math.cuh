// Fast float32 functions of the MUFU pipe, denormals flushed, and bounds that let NaN through.
#pragma once

namespace conclave::inline v0::cuda::device {

// 2^x within 2^-22.
__device__ __forceinline__ float ex2(float x) {
  float result = 0;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// 1 / x within one unit in the last place.
__device__ __forceinline__ float rcp(float x) {
  float result = 0;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// 1 / x within 2^-20; 0 or infinite where the result is not a normal number.
__device__ __forceinline__ double rcp_near(double x) {
  double result = 0;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(result) : "d"(x));
  return result;
}
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float result = 0;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result = 0;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

}  // namespace conclave::inline v0::cuda::device
