// Programmatic dependent launch between kernels; registers moved between warpgroups within one.
// Code for architectures before 9.0 never overlaps (cuda/launch.cc), so that both calls are
// nothing.
#pragma once

#include <cstdint>

namespace conclave::inline v0::cuda::device {

// Waits until the kernels before this one on the stream have finished and their writes are visible.
// It does nothing if the launch has no overlap.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel on the stream begin (its own wait still waits for all of this one).
__device__ __forceinline__ void grid_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Set the registers per thread of this warpgroup: a multiple of 8, from 24 to 240.
template <uint32_t kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <uint32_t kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// True in one thread of a converged warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected = 0;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

}  // namespace conclave::inline v0::cuda::device
