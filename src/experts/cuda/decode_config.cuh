// Element types of the decode kernel, and where a thread and its data are.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/mma.cuh"
#include "experts/cuda/decode_rows.cuh"
#include "experts/cuda/decode_sm90.h"
#include "experts/cuda/decode_tables.h"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

namespace ptx = cuda::device;

inline constexpr int kUpBoxBytes = 16 * kDecodeBoxBytes;
inline constexpr int kUpStageBoxes = kDecodeStageBytes / kUpBoxBytes;
inline constexpr int kTiles = kDecodeMaxPassRows / 16;
inline constexpr uint32_t kTileBytes = 16 * kDecodeBoxBytes;

template <DecodeElement kElement>
struct Config {
  static constexpr bool kIsE4M3 =
      kElement == DecodeElement::kE4M3Block || kElement == DecodeElement::kE4M3Row;
  static constexpr bool kBlockScales = kElement == DecodeElement::kE4M3Block;
  static constexpr bool kRowScales = kElement == DecodeElement::kE4M3Row;
  static constexpr int kBoxElements = kIsE4M3 ? 128 : 64;
  // Boxes whose intermediate values are loaded ahead: 16-bit ones are 8 registers, float32 are 32.
  static constexpr int kAhead = kIsE4M3 ? 2 : 4;

  static __device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1,
                                                  uint32_t a2, uint32_t a3, uint32_t b0,
                                                  uint32_t b1) {
    if constexpr (kIsE4M3) {
      ptx::mma_m16n8k32_e4m3(c, a0, a1, a2, a3, b0, b1);
    } else if constexpr (kElement == DecodeElement::kBF16) {
      ptx::mma_m16n8k16_bf16(c, a0, a1, a2, a3, b0, b1);
    } else {
      ptx::mma_m16n8k16_f16(c, a0, a1, a2, a3, b0, b1);
    }
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    return kElement == DecodeElement::kBF16 ? pack_bf16(low, high) : pack_f16(low, high);
  }
};

struct Shared {
  unsigned char* base;
  DecodeTables* tables;
  float* row_scales;  // [up_boxes, 8]; with a scale a row only the first line
  unsigned char* rows;
  float* sums;  // [pair, slice, block row], over the rows
};

struct Thread {
  int warp;
  int lane;
  int group;  // g: the token of a column it loads, a row of weights
  int quad;   // q
  // Rows of shared memory are taken in an order in which those of neighbouring groups lie in
  // different halves of the banks under the 128-byte swizzle.
  int row;
  uint32_t fragment;  // byte offset within 16 rows of a box

  __device__ Thread()
      : warp(static_cast<int>(threadIdx.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32),
        group(lane / 4),
        quad(lane % 4),
        row((group >> 1) | ((group & 1) << 2)),
        fragment(static_cast<uint32_t>(row * kDecodeBoxBytes + ((quad ^ row) << 4))) {}
};

}  // namespace conclave::inline v0::experts::decode
