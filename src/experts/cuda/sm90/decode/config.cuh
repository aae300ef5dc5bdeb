// Element types of the decode kernel, and where its threads and data lie.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/mma_integers.cuh"
#include "cuda/device/vector16.cuh"
#include "experts/cuda/common/e4m3.cuh"
#include "experts/cuda/common/ring.cuh"
#include "experts/cuda/common/row_rules.cuh"
#include "experts/cuda/common/vocabulary.h"
#include "experts/cuda/sm90/decode/decode.h"
#include "experts/cuda/sm90/decode/rows.cuh"
#include "experts/cuda/sm90/decode/tables.h"

#include <cstdint>
#include <type_traits>

namespace conclave::inline v0::experts::decode {

inline constexpr int kUpBoxBytes = 16 * kDecodeBoxBytes;
inline constexpr int kUpStageBoxes = kDecodeUpStageBoxes;
inline constexpr int kMaxProducts = kDecodeMaxPassRows / 16;
inline constexpr uint32_t kProductBytes = 16 * kDecodeBoxBytes;
inline constexpr int kNextTileWord = 32;  // index of a counter; the grid barrier is word 0

// Weights that are codes ask this of the kernel.
struct CodesOf {
  int bits = 0;          // 0: they are elements
  bool offsets = false;  // w = value scale - offset
  // CodeOrder::kLanesOfNumbers: code c stands for c + DecodeParams::least.
  bool in_order = false;
  bool in_pairs = false;     // CodeOrder::kLanesOfPairs
  bool whole = false;        // takes_whole_bytes
  int terms = 1;             // values of bf16 that add up to a code's
  bool exact = false;        // FactorForm::kExact
  bool powers = false;       // with `exact`: scales are powers of two; if not, they are of e4m3
  bool steps = false;        // has_steps(FactorForm)
  bool times_steps = false;  // with `steps`: multiplies_steps
};
constexpr CodesOf codes_of(DecodeElement element) {
  switch (element) {
    case DecodeElement::kCodes4:
      return {.bits = 4};
    case DecodeElement::kCodes4InOrder:
      return {.bits = 4, .in_order = true};
    case DecodeElement::kCodes4InOrderOffsets:
      return {.bits = 4, .offsets = true, .in_order = true};
    case DecodeElement::kCodes4InOrderSteps:
      return {.bits = 4, .offsets = true, .in_order = true, .steps = true};
    case DecodeElement::kCodes2:
      return {.bits = 2, .offsets = true, .in_order = true, .steps = true, .times_steps = true};
    case DecodeElement::kCodes4TimesSteps:
      return {.bits = 4, .in_order = true, .steps = true, .times_steps = true};
    case DecodeElement::kCodes4TimesOffsetSteps:
      return {.bits = 4, .offsets = true, .in_order = true, .steps = true, .times_steps = true};
    case DecodeElement::kCodes4Offsets:
      return {.bits = 4, .offsets = true};
    case DecodeElement::kCodes4InPairs:
      return {.bits = 4, .in_pairs = true};
    case DecodeElement::kCodes4PairsInTerms:
      return {.bits = 4, .in_pairs = true, .terms = 2};
    case DecodeElement::kCodes4Terms:
      return {.bits = 4, .terms = 2};
    case DecodeElement::kCodes4Powers:
      return {.bits = 4, .exact = true, .powers = true};
    case DecodeElement::kCodes4Floats:
      return {.bits = 4, .exact = true};
    case DecodeElement::kCodes8:
      return {.bits = 8};
    case DecodeElement::kWholes8:
      return {.bits = 8, .whole = true};
    case DecodeElement::kCodes8Steps:
      return {.bits = 8, .whole = true, .steps = true};
    case DecodeElement::kCodes8Offsets:
      return {.bits = 8, .offsets = true};
    case DecodeElement::kCodes8OffsetSteps:
      return {.bits = 8, .offsets = true, .steps = true};
    default:
      return {};
  }
}

// The rule of row_rules.cuh with less code.
struct E4m3Codes : E4m3Rows {
  static __device__ __forceinline__ float scale(float amax, bool power_of_two) {
    return short_group_scale(amax, power_of_two);
  }
};

template <DecodeElement kElement>
struct Config {
  static constexpr bool kIsE4M3 =
      kElement == DecodeElement::kE4M3Block || kElement == DecodeElement::kE4M3Row;
  static constexpr bool kIsInteger = kElement == DecodeElement::kInt8Row;
  static constexpr bool kIsByte = kIsE4M3 || kIsInteger;  // and so are rows
  using RowRule = std::conditional_t<kIsInteger, Int8Rows, E4m3Codes>;
  using Sum = std::conditional_t<kIsInteger, int32_t, float>;
  static constexpr CodesOf kCodes = codes_of(kElement);
  static constexpr bool kIsCoded = kCodes.bits != 0;
  static constexpr bool kHasSmallCodes = kCodes.bits == 2;
  // Units of steps that a box has.
  static constexpr int kUnitsOfBox = kHasSmallCodes ? 2 : 1;
  // Groups whose steps are a word: both numbers of one, the scales of two, or all of four.
  static constexpr int kGroupsOfWord = kHasSmallCodes ? 4 : kCodes.steps && !kCodes.offsets ? 2 : 1;
  static constexpr bool kHasLanes = kCodes.in_order || kCodes.in_pairs || kCodes.exact;
  static constexpr bool kTakesTable =
      kIsCoded && !kCodes.in_order && !kCodes.exact && !kCodes.whole;
  // Sums are multiplied by numbers that a matrix, or its codes, have.
  static constexpr bool kHasSumFactors = kTakesTable || kCodes.exact;
  static constexpr int kConsumerWarps = kDecodeWarps;
  static constexpr int kConsumers = 32 * kConsumerWarps;  // threads
  static constexpr int kProducerWarp = kConsumerWarps;
  static constexpr int kFinishWarp = kConsumerWarps + 1;
  static constexpr int kDrawWarp = kConsumerWarps + 2;
  static constexpr bool kIsBF16 = kElement == DecodeElement::kBF16 || kIsCoded;
  static constexpr bool kBlockScales = kElement == DecodeElement::kE4M3Block;
  static constexpr bool kRowScales = kElement == DecodeElement::kE4M3Row || kIsInteger;
  // Elements of the weights' map, which are bytes of codes.
  static constexpr int kBoxElements = kIsByte || kIsCoded ? 128 : 64;

  static __device__ __forceinline__ void multiply(Sum (&c)[4], uint32_t a0, uint32_t a1,
                                                  uint32_t a2, uint32_t a3, uint32_t b0,
                                                  uint32_t b1) {
    if constexpr (kIsInteger) {
      ptx::mma_m16n8k32_s8(c, a0, a1, a2, a3, b0, b1);
    } else if constexpr (kIsE4M3) {
      ptx::mma_m16n8k32_e4m3(c, a0, a1, a2, a3, b0, b1);
    } else if constexpr (kIsBF16) {
      ptx::mma_m16n8k16_bf16(c, a0, a1, a2, a3, b0, b1);
    } else {
      ptx::mma_m16n8k16_f16(c, a0, a1, a2, a3, b0, b1);
    }
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    using Element = std::conditional_t<kIsBF16, __nv_bfloat16, __half>;
    return ptx::pack_pair<Element>(low, high);
  }
};

struct Shared {
  unsigned char* ring;
  uint64_t* full;   // a stage has arrived
  uint64_t* empty;  // all warps have read it
  uint64_t* tile_full;
  uint64_t* tile_empty;
  uint64_t* tables_ready;
  uint64_t* intermediate_ready;  // all blocks have stored theirs
  float* stage_scales;           // two per box
  unsigned char* factors;        // a part for each stage of codes
  uint32_t* values;              // what codes stand for, a copy for each lane of a warp
  DecodeTables* tables;
  float* tiles;         // [buffer, warp, i, lane]; later sums [warp, token, row]
  unsigned char* rows;  // input rows, later rounds of slices of intermediate rows
  float* row_scales;    // [row, box], or one per row at the first box

  __device__ Shared(unsigned char* base, const DecodeShared& places)
      : ring(base),
        full(reinterpret_cast<uint64_t*>(base + places.barriers)),
        empty(full + places.stages),
        tile_full(empty + places.stages),
        tile_empty(tile_full + kDecodeTileBuffers),
        tables_ready(tile_empty + kDecodeTileBuffers),
        intermediate_ready(tables_ready + 1),
        stage_scales(reinterpret_cast<float*>(base + places.stage_scales)),
        factors(base + places.factors),
        values(reinterpret_cast<uint32_t*>(base + places.values)),
        tables(reinterpret_cast<DecodeTables*>(base + places.tables)),
        tiles(reinterpret_cast<float*>(base + places.tiles)),
        rows(base + places.rows),
        row_scales(reinterpret_cast<float*>(base + places.row_scales)) {}
};

struct Thread {
  int warp;
  int lane;
  int group;  // g: gives the token that it loads and its row of weights
  int quad;   // q
  // The order of rows in shared memory puts those of neighbouring groups into different halves of
  // the banks under the 128-byte swizzle.
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

using Ring = RingPosition<>;  // the number of stages depends on the call

// The barrier of the warps that multiply.
template <class Config>
__device__ __forceinline__ void consumer_sync() {
  ptx::named_barrier_sync(1, Config::kConsumers);
}

}  // namespace conclave::inline v0::experts::decode
