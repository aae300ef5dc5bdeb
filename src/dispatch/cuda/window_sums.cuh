// The kernel of sums of rows over ranks. A warp makes a unit of a peer's rows and stores it, then
// one of this rank's own, so that the wire and this rank's memory are busy together.
#pragma once

#include "comm/nccl/window_parts.cuh"
#include "comm/nccl/window_units.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/vector16.cuh"
#include "dispatch/cuda/combine_rows.cuh"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::dispatch::device {

namespace window = comm::window;

inline constexpr int kSumThreads = 512;
inline constexpr int kSumWarps = kSumThreads / 32;
// Units whose loads are under way together when parts are added.
inline constexpr int kUnitsAhead = 4;
// A warp's own units whose making takes as long as its flags travel.
inline constexpr int kOwnLast = 4;

// How a rank's part is made. Each has kernels of its own: a block runs most of the code once or
// twice, and instructions that it does not need would be fetched, or keep it from the wire.
enum class PartOf : uint8_t {
  kRows,   // made already, in float32
  kSlots,  // the weighted sum of slots, and nothing else
  kAll,    // every term of a combine
};

struct WindowSumParams {
  CombineParams part;
  int32_t units_per_row;
  int32_t first_row[comm::kMaxWindowRanks];  // where each rank's rows begin
  int32_t units[comm::kMaxWindowRanks];
  bool same_rows;  // all ranks have the same
  std::byte* own;  // units of this rank's rows
  float scale;
  const int64_t* live_tokens;
  DeviceTensor out;
};

// Lane l has columns 8 l to 8 l + 7 of a unit of kPartColumns columns.
template <class Part>
__device__ __forceinline__ Part* place_in_unit(std::byte* unit) {
  return reinterpret_cast<Part*>(unit) + threadIdx.x % 32 * kLaneColumns;
}
template <class Part>
inline constexpr int32_t kUnitBytes = kPartColumns * static_cast<int32_t>(sizeof(Part));

// A peer's memory takes whole lines: the lanes of a store have neighbouring 16 bytes.
template <class Part>
__device__ __forceinline__ void store_to_peer(const Sums& sum, std::byte* unit) {
  const uint32_t lane = threadIdx.x % 32;
  if constexpr (sizeof(Part) == 4) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t from = half * 16 + lane / 2;
      float four[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float low = __shfl_sync(0xffffffffU, sum[c], from);
        const float high = __shfl_sync(0xffffffffU, sum[4 + c], from);
        four[c] = lane % 2 == 0 ? low : high;
      }
      reinterpret_cast<float4*>(unit)[half * 32 + lane] =
          make_float4(four[0], four[1], four[2], four[3]);
    }
  } else {
    cuda::device::store_8(sum, place_in_unit<Part>(unit));
  }
}

// Loads eight columns that another kernel, or rank, may have stored meanwhile.
template <class Part>
__device__ __forceinline__ void load_arrived(const std::byte* unit, Sums& values) {
  const auto* const from =
      reinterpret_cast<const uint4*>(place_in_unit<const Part>(const_cast<std::byte*>(unit)));
  cuda::device::Raw8<Part> raw;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Part)) / 2; ++i) raw.words[i] = __ldcg(from + i);
  raw.widen_to(values);
}

// Row is what experts have stored, Part what travels.
template <class Row, class Part, PartOf kPartOf>
struct WindowSum {
  const comm::WindowParams& windows;
  const WindowSumParams& params;
  uint32_t epoch;
  int32_t warp;
  int32_t live;  // rows of the part from here on count for nothing

  static __device__ __forceinline__ int32_t lane() {
    return static_cast<int32_t>(threadIdx.x % 32);
  }
  __device__ __forceinline__ int32_t share_of(int32_t rank) const {
    return static_cast<int32_t>(
        comm::units_of_block(static_cast<int64_t>(params.units[rank]), windows.lane_bits));
  }

  // Choices of slots that lanes hold: of one row, or of as many as 32 lanes have slots of.
  __device__ __forceinline__ int32_t lanes_of_row() const {
    const int32_t top_k = params.part.top_k;
    return kPartOf == PartOf::kSlots && top_k > 0 && top_k < 32 ? top_k : 32;
  }

  // This warp's units of the rows of a rank, one behind the other: they share a row's choices,
  // which take two loads, one after the other, before the first of its rows is asked for.
  struct Walk {
    int32_t rank;
    int32_t left;   // units
    int32_t unit;   // the next one
    int32_t row;    // its row, among those of its rank
    int32_t place;  // the unit's, in its row
    int32_t first;  // the row of lane 0's slot
    LaneSlot slots;
    std::byte* to;  // units of the rank's rows lie there
  };
  // Without the choices.
  __device__ __forceinline__ Walk walk_of(int32_t rank) const {
    const int32_t share = share_of(rank);
    const int32_t of_warp = (share + kSumWarps - 1) / kSumWarps;
    const int32_t begin = min(warp * of_warp, share);
    const int32_t end = min(begin + of_warp, share);
    const int32_t before = share * static_cast<int32_t>(blockIdx.x);
    Walk walk;
    walk.rank = rank;
    walk.unit = before + begin;
    walk.left = min(before + end, params.units[rank]) - walk.unit;
    walk.row = static_cast<int32_t>(static_cast<uint32_t>(walk.unit) /
                                    static_cast<uint32_t>(params.units_per_row));
    walk.place = walk.unit - walk.row * params.units_per_row;
    walk.first = walk.row;
    walk.slots = {false, 0};
    walk.to = rank == windows.rank ? params.own : window::unit_at(windows, epoch, rank, 0);
    return walk;
  }
  __device__ __forceinline__ void hold_choices(Walk& walk) const {
    if (kPartOf == PartOf::kRows || walk.left <= 0) return;
    const int32_t lanes = lanes_of_row();
    const int32_t ahead = lane() / lanes;
    const int32_t token = params.first_row[walk.rank] + walk.row + ahead;
    walk.first = walk.row;
    walk.slots = {false, 0};
    if ((ahead + 1) * lanes <= 32 && token < live) {
      walk.slots = read_slot(params.part, token, lane() - ahead * lanes);
    }
  }
  __device__ __forceinline__ void pass(Walk& walk) const {
    --walk.left;
    ++walk.unit;
    if (++walk.place < params.units_per_row) return;
    walk.place = 0;
    ++walk.row;
  }

  // The columns of the lane in the row, which is among the rows of all.
  __device__ __forceinline__ LaneTile tile_of(int32_t row, int32_t place) const {
    const int32_t column = place * kPartColumns + lane() * kLaneColumns;
    const int32_t left = static_cast<int32_t>(params.part.hidden_size) - column;
    return {row, column, left < kLaneColumns ? left : kLaneColumns};
  }
  __device__ __forceinline__ void make(const Walk& walk, Sums& sum) const {
#pragma unroll
    for (float& value : sum) value = 0;
    const LaneTile tile[1] = {tile_of(params.first_row[walk.rank] + walk.row, walk.place)};
    if (tile[0].token >= live) return;
    if constexpr (kPartOf == PartOf::kRows) {
      if (tile[0].columns > 0) load_as<float>(params.part.routed, tile[0].token, tile[0], sum);
    } else if constexpr (kPartOf == PartOf::kSlots) {
      add_slots(walk, tile[0], sum);
    } else {
      // Beside every term there are fewer registers for rows that are under way together.
      constexpr int kRows = 8 / static_cast<int>(sizeof(Row));
      combine_tile<Row, kRows, Terms::kAll>(params.part, tile, walk.slots,
                                            [&](const LaneTile&, const Sums& row) {
#pragma unroll
                                              for (int c = 0; c < kLaneColumns; ++c)
                                                sum[c] = row[c];
                                            });
    }
  }
  // Rows of slots on this rank are under way together, kRows slots at a time.
  __device__ __forceinline__ void add_slots(const Walk& walk, const LaneTile& tile,
                                            Sums& sum) const {
    constexpr int kRows = 16 / static_cast<int>(sizeof(Row));
    const int32_t top_k = params.part.top_k;
    const bool has_columns = tile.columns > 0;
    const int64_t stride = params.part.expert_row_stride;
    const Row* rows = static_cast<const Row*>(params.part.expert_rows) +
                      tile.token * top_k * stride + tile.column;
    LaneSlot slots = walk.slots;
    int32_t source = (walk.row - walk.first) * lanes_of_row();  // the lane of the first slot
#pragma unroll 1
    for (int32_t first = 0; first < top_k; first += 32) {
      if (first > 0) {
        slots = read_slot(params.part, tile.token, first + lane());
        source = 0;
      }
      uint32_t present =
          __ballot_sync(0xffffffffU, slots.present) >> source & slots_below(first, top_k);
      const Row* row = rows;
#pragma unroll 1
      for (; present != 0; present >>= kRows, source += kRows) {
        const uint32_t wanted = has_columns ? present : 0;
        cuda::device::Raw8<Row> values[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i, row += stride) {
          if ((wanted >> i & 1U) != 0) values[i].load_once(row);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if ((present >> i & 1U) == 0) continue;
          const float factor = __shfl_sync(0xffffffffU, slots.weight, source + i);
          Sums addend;
          values[i].widen_to(addend);
          add_product(factor, addend, sum);
        }
      }
      rows += 32 * stride;
    }
    if (has_columns) return;
#pragma unroll
    for (float& value : sum) value = 0;
  }
  __device__ __forceinline__ void store(const Walk& walk, const Sums& sum) const {
    const int32_t offset = walk.unit * kUnitBytes<Part>;
    if (walk.rank != windows.rank) return store_to_peer<Part>(sum, walk.to + offset);
    cuda::device::store_8(sum, place_in_unit<Part>(walk.to + offset));
    if (!params.same_rows) return;
#pragma unroll 1
    for (int32_t step = 1; step < windows.ranks; ++step) {
      const int32_t peer = peer_at(step);
      store_to_peer<Part>(sum, window::unit_at(windows, epoch, peer, offset));
    }
  }
  __device__ __forceinline__ int32_t peer_at(int32_t step) const {
    const int32_t peer = windows.rank + step;
    return peer < windows.ranks ? peer : peer - windows.ranks;
  }

  // Units of peers, and one of this rank's own after each until kOwnLast are left: these are made
  // while flags travel. Where all ranks have the same rows each is made once. `sent` is called by
  // all threads of the block when they have stored what peers get.
  template <class Sent>
  __device__ __forceinline__ void make_all(const Sent& sent) const {
    const int32_t steps = params.same_rows ? 1 : windows.ranks;
    int32_t step = 1;
    Walk own = walk_of(windows.rank);
    Walk peers = own;
    peers.left = 0;
    if (step < steps) {
      peers = walk_of(peer_at(step));
      hold_choices(peers);
    }
    hold_choices(own);
    bool is_sent = false;
    bool own_is_next = false;
#pragma unroll 1
    while (true) {
#pragma unroll 1
      while (peers.left <= 0 && ++step < steps) {
        peers = walk_of(peer_at(step));
        hold_choices(peers);
      }
      const bool peers_are_done = peers.left <= 0;
      const bool ends = peers_are_done && own.left <= 0;
      if (!is_sent && (params.same_rows ? ends : peers_are_done)) {
        sent();
        is_sent = true;
      }
      if (ends) return;
      const bool is_own = peers_are_done || (own_is_next && own.left > kOwnLast);
      Walk now = is_own ? own : peers;
      Sums sum;
      make(now, sum);
      store(now, sum);
      pass(now);
      if ((now.row - now.first + 1) * lanes_of_row() > 32) hold_choices(now);
      own_is_next = !is_own;
      if (is_own) {
        own = now;
      } else {
        peers = now;
      }
    }
  }

  // The part of one rank of a unit of this rank's rows.
  __device__ __forceinline__ void load_part(int32_t rank, int32_t unit, Sums& values) const {
    const std::byte* const from =
        rank == windows.rank ? params.own : window::arrived(windows, epoch, rank);
    load_arrived<Part>(from + unit * kUnitBytes<Part>, values);
  }
  __device__ __forceinline__ void add_up() const {
    Walk walk = walk_of(windows.rank);
    const int64_t own_live = params.live_tokens == nullptr ? INT64_MAX : *params.live_tokens;
#pragma unroll 1
    while (walk.left > 0) {
      const int32_t count = min(walk.left, kUnitsAhead);
      Sums sums[kUnitsAhead];
#pragma unroll
      for (int i = 0; i < kUnitsAhead; ++i) {
        if (i < count) load_part(0, walk.unit + i, sums[i]);
      }
#pragma unroll 1
      for (int32_t rank = 1; rank < windows.ranks; ++rank) {
        Sums next[kUnitsAhead];
#pragma unroll
        for (int i = 0; i < kUnitsAhead; ++i) {
          if (i < count) load_part(rank, walk.unit + i, next[i]);
        }
#pragma unroll
        for (int i = 0; i < kUnitsAhead; ++i) {
#pragma unroll
          for (int c = 0; c < kLaneColumns; ++c) sums[i][c] = __fadd_rn(sums[i][c], next[i][c]);
        }
      }
#pragma unroll
      for (int i = 0; i < kUnitsAhead; ++i) {
        if (i >= count) break;
        finish(tile_of(walk.row, walk.place), own_live, sums[i]);
        pass(walk);
      }
    }
  }
  __device__ __forceinline__ void finish(const LaneTile& tile, int64_t own_live, Sums& sum) const {
    if (tile.columns <= 0 || tile.token >= own_live) return;
#pragma unroll
    for (float& value : sum) value = __fmul_rn(value, params.scale);
    store_row(params.out, tile, sum);
  }
};

template <class Row, class Part, PartOf kPartOf>
__global__ void __launch_bounds__(kSumThreads, 1)
    window_sum_kernel(const __grid_constant__ comm::WindowParams windows,
                      const __grid_constant__ WindowSumParams params) {
  __shared__ int differs;
  cuda::device::grid_dependency_wait();
  const window::Turn turn = window::begin_turn(windows);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread == 0) differs = 0;
  window::say_claims(windows, turn.epoch);
  const auto live = static_cast<int32_t>(live_rows(params.part));
  const WindowSum<Row, Part, kPartOf> sum{windows, params, turn.epoch, thread / 32, live};
  sum.make_all([&] {
    __syncthreads();
    if (thread < windows.ranks && thread != windows.rank) {
      window::raise_flag_of_units(windows, turn.epoch, thread, params.units[thread]);
    }
    window::mark_turn(windows);
  });
  // Each peer sends as many units as this rank has.
  const auto own_units = [&](int32_t) { return int64_t{params.units[windows.rank]}; };
  const bool came = window::await_units(windows, turn.epoch, own_units, differs);
  cuda::device::grid_launch_dependents();
  if (came) sum.add_up();
  window::finish(windows, turn);
}

}  // namespace conclave::inline v0::dispatch::device
