#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/vector16.cuh"
#include "cuda/launch.h"
#include "experts/cuda/common/e4m3.cuh"
#include "experts/cuda/common/exact_quotient.cuh"
#include "experts/cuda/common/quantize_rows.h"
#include "experts/cuda/common/row_rules.cuh"
#include "experts/cuda/common/vocabulary.h"
#include "quant/e4m3/e4m3.h"
#include "quant/int8/int8.h"

#include <algorithm>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0::experts {
namespace {

constexpr int kThreads = 256;
constexpr int kPart = 16;                         // columns per thread: one 16-byte store of codes
constexpr int kGroupParts = kScaleGroup / kPart;  // threads that share a scale

enum class Vectors : uint8_t { kNo, kYes };  // kYes: all 16-byte accesses are aligned

// 16 columns of a row, unconverted; 0 from `count` on.
template <class T>
struct Part {
  alignas(16) T raw[kPart];

  template <Vectors kVectors>
  __device__ __forceinline__ void load(const T* source, int32_t count) {
    if (kVectors == Vectors::kYes && count >= kPart) {
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(raw) / 16); ++i) {
        reinterpret_cast<uint4*>(raw)[i] = __ldg(reinterpret_cast<const uint4*>(source) + i);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kPart; ++i) raw[i] = i < count ? source[i] : T(0.0F);
  }
  __device__ __forceinline__ void widen_to(float (&x)[kPart]) const {
#pragma unroll
    for (int i = 0; i < kPart; ++i) x[i] = ptx::widen(raw[i]);
  }
};

template <class T, Vectors kVectors>
__device__ __forceinline__ void load_part(const T* source, int32_t count, float (&x)[kPart]) {
  Part<T> part;
  part.template load<kVectors>(source, count);
  part.widen_to(x);
}

template <Vectors kVectors>
__device__ __forceinline__ void store_part(uint8_t* target, int32_t count,
                                           const uint32_t (&words)[kPart / 4]) {
  if (kVectors == Vectors::kYes && count >= kPart) {
    *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    if (i < count) target[i] = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
  }
}

// Puts the codes of 32 columns, which a thread and its neighbour have halves of, in the order of
// lanes: each gets those of two words of weights, and stores them where its own half would lie.
__device__ __forceinline__ void arrange_in_lanes(uint32_t (&words)[kPart / 4]) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t both = 3U << (lane & 30U);
  const bool is_second = lane % 2 != 0;
  // Columns 0 to 3 and 8 to 11 of both halves are the first thread's, the others the second's.
  const uint32_t low = __shfl_xor_sync(both, is_second ? words[0] : words[1], 1);
  const uint32_t high = __shfl_xor_sync(both, is_second ? words[2] : words[3], 1);
  const uint32_t quarter[4] = {is_second ? low : words[0], is_second ? high : words[2],
                               is_second ? words[1] : low, is_second ? words[3] : high};
  // Pairs of columns have their bits in this order.
  const uint32_t outer[2] = {__byte_perm(quarter[3], quarter[1], 0x5140),
                             __byte_perm(quarter[3], quarter[1], 0x7362)};
  const uint32_t inner[2] = {__byte_perm(quarter[0], quarter[2], 0x5140),
                             __byte_perm(quarter[0], quarter[2], 0x7362)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    words[2 * i] = __byte_perm(outer[i], inner[i], 0x5410);
    words[2 * i + 1] = __byte_perm(outer[i], inner[i], 0x7632);
  }
}

template <class Codes>
__device__ __forceinline__ float largest(const float (&x)[kPart]) {
  float amax = 0;
#pragma unroll
  for (int i = 0; i < kPart; ++i) amax = Codes::larger(amax, x[i]);
  return amax;
}

// Divides a 16-bit x by a scale through a reciprocal in two parts, with an error below 2^-46 and a
// quarter of the work of __fdiv_rn. The code equals that of the IEEE 754 quotient for every x and
// every scale that brings it near a boundary between codes, except scales whose mantissa is all
// ones, which no 16-bit number divided by 448 or 127 is (for float32 x, two of 1e9 differ). The
// first part is rounded down, so the second is not negative and zeros keep their signs.
struct Reciprocal {
  float high;
  float low;
};
__device__ __forceinline__ Reciprocal reciprocal_of(float scale) {
  Reciprocal result;
  result.high = __frcp_rn(scale);
  if (__fmaf_rn(scale, result.high, -1.0F) > 0) {
    result.high = __uint_as_float(__float_as_uint(result.high) - 1);
  }
  result.low = __fmul_rn(__fmaf_rn(-scale, result.high, 1.0F), result.high);
  return result;
}
__device__ __forceinline__ float times(float x, const Reciprocal& reciprocal) {
  return __fmaf_rn(x, reciprocal.high, __fmul_rn(x, reciprocal.low));
}

using Words = uint32_t[kPart / 4];

template <class Divide, class Pack>
__device__ __forceinline__ void encode_with(const float (&x)[kPart], Words& words,
                                            const Divide& by_scale, const Pack& pack) {
#pragma unroll
  for (int i = 0; i < kPart / 4; ++i) {
    words[i] = pack(by_scale(x[4 * i]), by_scale(x[4 * i + 1]), by_scale(x[4 * i + 2]),
                    by_scale(x[4 * i + 3]));
  }
}

enum class Scale : uint8_t { kDynamic, kStatic };

// With a static scale, quotients may overflow, so the reciprocal is not used, and an infinite value
// needs care. With a dynamic one its scale is infinite, and so its quotient is NaN already.
template <class Codes, class T, Scale kScale>
__device__ __forceinline__ void encode(const float (&x)[kPart], float scale, Words& words) {
  const auto pack_near = [](float a, float b, float c, float d) {
    return Codes::pack_near(a, b, c, d);
  };
  if (sizeof(T) == 2 && kScale == Scale::kDynamic && is_plain(scale)) {
    const Reciprocal reciprocal = reciprocal_of(scale);
    encode_with(
        x, words, [=](float value) { return times(value, reciprocal); }, pack_near);
  } else if (sizeof(T) == 4 && kScale == Scale::kDynamic && has_inverse(scale)) {
    const Inverse inverse = inverse_of(scale);
    encode_with(
        x, words, [=](float value) { return times(value, inverse); }, pack_near);
  } else {
    encode_with(
        x, words,
        [=](float value) {
          return kScale == Scale::kStatic ? quant::code_quotient(value, scale)
                                          : __fdiv_rn(value, scale);
        },
        [](float a, float b, float c, float d) { return Codes::pack(a, b, c, d); });
  }
}

// Calls visit(target) for every target row of input row `row`.
template <class Visit>
__device__ __forceinline__ void for_each_target(const QuantizeRowsCuda& args, int64_t row,
                                                const Visit& visit) {
  if (args.slot_row == nullptr) return visit(row);
  const int32_t* targets = args.slot_row + row * args.top_k;
  for (int32_t slot = 0; slot < args.top_k; ++slot) {
    const int32_t target = __ldg(targets + slot);
    if (target >= 0) visit(int64_t{target});
  }
}

__device__ __forceinline__ int64_t live_rows(const QuantizeRowsCuda& args) {
  return args.live_rows == nullptr ? args.num_rows : min(args.num_rows, int64_t{*args.live_rows});
}

// The division of groups of columns among blocks, which take kGroupsOfBlock each.
constexpr uint32_t kGroupsOfBlock = kThreads / kGroupParts;
struct GroupGrid {
  uint32_t groups = 1;  // per row
  uint32_t rows_of_block = 1;
  uint32_t blocks_of_row = 1;  // 1 if a block has several rows
  int32_t turns = 1;           // rows per thread, `turn_rows` apart
  int64_t turn_rows = 0;
};

// The group that a thread shares with seven neighbours, and its own 16 columns.
struct GroupPlace {
  int64_t row;
  uint32_t group;
  int64_t column;
  int32_t columns;  // 0 if the thread has no columns
};
__device__ __forceinline__ GroupPlace place_of_thread(const QuantizeRowsCuda& args,
                                                      const GroupGrid& grid) {
  const uint32_t unit = threadIdx.x / kGroupParts;
  const bool many = grid.blocks_of_row > 1;
  const uint32_t row_of_block = many ? 0 : unit / grid.groups;
  GroupPlace place;
  place.row = int64_t{blockIdx.x / grid.blocks_of_row} * grid.rows_of_block + row_of_block;
  place.group = many ? blockIdx.x % grid.blocks_of_row * kGroupsOfBlock + unit : unit % grid.groups;
  place.column = int64_t{place.group} * kScaleGroup + threadIdx.x % kGroupParts * kPart;
  const bool used = row_of_block < grid.rows_of_block && place.group < grid.groups;
  const int64_t left = used ? args.columns - place.column : 0;
  place.columns = static_cast<int32_t>(max(int64_t{0}, min(int64_t{kPart}, left)));
  if (!used) place.row = args.num_rows;
  return place;
}

// The scale of a group; its eight threads call this together.
template <Scale kScale>
__device__ __forceinline__ float scale_group(const QuantizeRowsCuda& args,
                                             const float (&x)[kPart]) {
  if constexpr (kScale == Scale::kStatic) {
    return *args.static_scale;
  } else {
    float amax = largest<E4m3Rows>(x);
#pragma unroll
    for (int distance = 1; distance < kGroupParts; distance *= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
    }
    return group_scale(amax, args.power_of_two);
  }
}

// One thread per 16 columns of `turns` rows; it requests the next row before the current one is
// done.
template <class T, Vectors kVectors, Scale kScale>
__global__ void __launch_bounds__(kThreads)
    quantize_groups(const QuantizeRowsCuda args, const GroupGrid grid) {
  GroupPlace place = place_of_thread(args, grid);
  // Rows that are ready are requested before the grouping, which says where they go, has ended.
  const bool waits_first = !args.rows_are_ready || args.slot_row == nullptr;
  if (waits_first) ptx::grid_dependency_wait();
  const int64_t rows = live_rows(args);
  const auto load = [&](int64_t row, Part<T>& part) {
    const T* source = static_cast<const T*>(args.rows) + row * args.row_stride + place.column;
    part.template load<kVectors>(source, row < rows ? place.columns : 0);
  };
  Part<T> next;
  load(place.row, next);
  if (!waits_first) ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const bool stores_scale = kScale == Scale::kDynamic && threadIdx.x % kGroupParts == 0;
  for (int32_t turn = 0; turn < grid.turns; ++turn, place.row += grid.turn_rows) {
    float x[kPart];
    next.widen_to(x);
    if (turn + 1 < grid.turns) load(place.row + grid.turn_rows, next);
    const float scale = scale_group<kScale>(args, x);
    if (place.row >= rows) continue;
    Words words;
    encode<E4m3Rows, T, kScale>(x, scale, words);
    if (args.in_lanes) arrange_in_lanes(words);
    for_each_target(args, place.row, [&](int64_t target) {
      if (stores_scale) {
        args.scales[target * args.scale_stride + place.group * args.group_stride] = scale;
      }
      if (place.columns > 0) {
        store_part<kVectors>(args.codes + target * args.code_stride + place.column, place.columns,
                             words);
      }
    });
  }
}

// The division of whole rows among blocks: a block has several rows, each of which has 1, 2, 4 or 8
// warps.
struct RowGrid {
  int32_t warps_of_row = 1;
};

// All threads of a block call this together.
template <class Codes>
__device__ __forceinline__ float row_amax(float amax, const RowGrid& grid) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    amax = Codes::larger(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
  }
  if (grid.warps_of_row == 1) return amax;
  __shared__ float of_warp[kThreads / 32];
  const auto warp = static_cast<int32_t>(threadIdx.x) / 32;
  if (threadIdx.x % 32 == 0) of_warp[warp] = amax;
  __syncthreads();
  const int32_t first = warp / grid.warps_of_row * grid.warps_of_row;
  for (int32_t i = 0; i < grid.warps_of_row; ++i) amax = Codes::larger(amax, of_warp[first + i]);
  return amax;
}

// Up to two parts of each thread stay in registers between the two passes.
constexpr int kHeld = 2;

template <class Codes, class T, Vectors kVectors>
__global__ void __launch_bounds__(kThreads)
    quantize_whole_rows(const QuantizeRowsCuda args, const RowGrid grid) {
  // Rows that are ready are requested before the grouping, which says where they go, has ended.
  const bool waits_first = !args.rows_are_ready || args.live_rows != nullptr;
  if (waits_first) ptx::grid_dependency_wait();
  const int32_t threads = grid.warps_of_row * 32;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int64_t row = int64_t{blockIdx.x} * (kThreads / threads) + thread / threads;
  const int64_t columns = row < live_rows(args) ? args.columns : 0;
  const T* source = static_cast<const T*>(args.rows) + row * args.row_stride;
  const int64_t first = int64_t{thread % threads} * kPart;
  const int64_t step = int64_t{threads} * kPart;
  const auto columns_left = [&](int64_t column) {
    return static_cast<int32_t>(max(int64_t{0}, min(int64_t{kPart}, columns - column)));
  };
  Part<T> parts[kHeld];
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    const int64_t column = first + h * step;
    parts[h].template load<kVectors>(source + column, columns_left(column));
  }
  if (!waits_first) ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  float held[kHeld][kPart];
  float amax = 0;
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    parts[h].widen_to(held[h]);
    amax = Codes::larger(amax, largest<Codes>(held[h]));
  }
  float x[kPart];
  for (int64_t column = first + kHeld * step; column < columns; column += step) {
    load_part<T, kVectors>(source + column, columns_left(column), x);
    amax = Codes::larger(amax, largest<Codes>(x));
  }
  const float scale = Codes::scale(row_amax<Codes>(amax, grid), args.power_of_two);
  const auto store = [&](int64_t column, const float(&values)[kPart]) {
    Words words;
    encode<Codes, T, Scale::kDynamic>(values, scale, words);
    if (args.in_lanes && column < columns) arrange_in_lanes(words);
    for_each_target(args, row, [&](int64_t target) {
      if (column == 0) args.scales[target * args.scale_stride] = scale;
      store_part<kVectors>(args.codes + target * args.code_stride + column, columns_left(column),
                           words);
    });
  };
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    const int64_t column = first + h * step;
    if (column < columns) store(column, held[h]);
  }
  for (int64_t column = first + kHeld * step; column < columns; column += step) {
    load_part<T, kVectors>(source + column, columns_left(column), x);
    store(column, x);
  }
}

template <class Codes, class T, Vectors kVectors>
void enqueue_whole_rows(const QuantizeRowsCuda& args, CUstream_st* stream) {
  constexpr int32_t kMostWarps = kThreads / 32;
  // With few rows it counts how long one takes.
  constexpr int64_t kManyRows = 4096;
  const int64_t parts_of_thread = args.num_rows < kManyRows ? 1 : kHeld;
  RowGrid grid;
  while (grid.warps_of_row < kMostWarps &&
         grid.warps_of_row * 32 * kPart * parts_of_thread < args.columns) {
    grid.warps_of_row *= 2;
  }
  cuda::launch("experts.quantize_rows", &quantize_whole_rows<Codes, T, kVectors>,
               {.blocks = ceil_div(args.num_rows, int64_t{kMostWarps / grid.warps_of_row}),
                .threads = kThreads,
                .stream = stream},
               args, grid);
}

template <class T, Vectors kVectors>
void enqueue(const QuantizeRowsCuda& args, CUstream_st* stream) {
  if (args.code_dtype == quant::Int8::kElement) {
    return enqueue_whole_rows<Int8Rows, T, kVectors>(args, stream);
  }
  if (args.activations == ActivationScale::kToken) {
    return enqueue_whole_rows<E4m3Rows, T, kVectors>(args, stream);
  }
  // From this many rows on, blocks fill the device several times even with turns. Turns make rows
  // that are written once 20 % faster, but rows that are written several times, which wait for
  // their stores, 2 to 10 % slower.
  constexpr int64_t kRowsOfTurns = 4096;
  const bool takes_turns = args.top_k == 1 && args.num_rows >= kRowsOfTurns;
  const auto groups = static_cast<uint32_t>(ceil_div(args.columns, kScaleGroup));
  GroupGrid grid{.groups = groups,
                 .rows_of_block = std::max(kGroupsOfBlock / groups, 1U),
                 .blocks_of_row = (groups + kGroupsOfBlock - 1) / kGroupsOfBlock,
                 .turns = takes_turns ? 4 : 1};
  const int64_t row_blocks = ceil_div(args.num_rows, grid.rows_of_block * int64_t{grid.turns});
  grid.turn_rows = row_blocks * grid.rows_of_block;
  const cuda::LaunchShape shape{
      .blocks = row_blocks * grid.blocks_of_row, .threads = kThreads, .stream = stream};
  if (args.activations == ActivationScale::kTensorStatic) {
    cuda::launch("experts.quantize_static", &quantize_groups<T, kVectors, Scale::kStatic>, shape,
                 args, grid);
  } else {
    cuda::launch("experts.quantize_groups", &quantize_groups<T, kVectors, Scale::kDynamic>, shape,
                 args, grid);
  }
}

template <class T>
void enqueue_as(const QuantizeRowsCuda& args, CUstream_st* stream) {
  const bool aligned = reinterpret_cast<uintptr_t>(args.rows) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(args.codes) % 16 == 0 &&
                       args.row_stride * static_cast<int64_t>(sizeof(T)) % 16 == 0 &&
                       args.code_stride % 16 == 0;
  aligned ? enqueue<T, Vectors::kYes>(args, stream) : enqueue<T, Vectors::kNo>(args, stream);
}

}  // namespace

void quantize_rows_cuda(const QuantizeRowsCuda& args, CUstream_st* stream) {
  if (args.num_rows == 0 || args.columns == 0) return;
  const bool is_fast =
      args.code_dtype == quant::E4m3::kElement ||
      (args.code_dtype == quant::Int8::kElement && args.activations == ActivationScale::kToken);
  if (!is_fast) return quantize_rows_plain(args, stream);
  switch (args.dtype) {
    case DType::kF32:
      return enqueue_as<float>(args, stream);
    case DType::kF16:
      return enqueue_as<__half>(args, stream);
    default:
      return enqueue_as<__nv_bfloat16>(args, stream);
  }
}

}  // namespace conclave::inline v0::experts
