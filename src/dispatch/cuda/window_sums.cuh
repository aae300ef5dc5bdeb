// The kernel of sums of rows over ranks. A warp makes a unit of a peer's rows and stores it, then
// one of this rank's own, so that the wire and this rank's memory are busy together.
#pragma once

#include "comm/nccl/window_parts.cuh"
#include "comm/nccl/window_units.cuh"
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

  // One of this warp's units, of the rows of a rank; none if below 0.
  struct Work {
    int32_t rank;
    int32_t unit;
  };
  __device__ __forceinline__ Work work(int32_t rank, int32_t turn) const {
    const auto share = static_cast<int32_t>(
        comm::units_of_block(static_cast<int64_t>(params.units[rank]), windows.lane_bits));
    const int32_t in_share = warp + turn * kSumWarps;
    const int32_t unit = share * static_cast<int32_t>(blockIdx.x) + in_share;
    return {rank, turn >= 0 && in_share < share && unit < params.units[rank] ? unit : -1};
  }
  __device__ __forceinline__ int32_t turns(int32_t rank) const {
    const window::Units share = window::units_of(windows, params.units[rank]);
    return static_cast<int32_t>(share.end - share.begin + kSumWarps - 1) / kSumWarps;
  }

  // A row of its rank, and the columns of the lane.
  __device__ __forceinline__ LaneTile tile_of(int32_t unit) const {
    const auto row = static_cast<int32_t>(static_cast<uint32_t>(unit) /
                                          static_cast<uint32_t>(params.units_per_row));
    const int32_t column = (unit - row * params.units_per_row) * kPartColumns +
                           static_cast<int32_t>(threadIdx.x % 32) * kLaneColumns;
    const int32_t left = static_cast<int32_t>(params.part.hidden_size) - column;
    return {row, column, left < kLaneColumns ? left : kLaneColumns};
  }

  // A unit whose choices are requested, then looked at, a unit later each: whether a slot is here
  // takes two loads, one after the other, and its rows a third.
  struct Asked {
    Work work;
    LaneTile tile;  // among the rows of all
    SlotChoice choice;
  };
  struct Ready {
    Work work;
    LaneTile tile;
    LaneSlot slots;
  };
  static __device__ __forceinline__ int32_t lane() {
    return static_cast<int32_t>(threadIdx.x % 32);
  }
  __device__ __forceinline__ Asked ask(const Work& it) const {
    Asked asked{it, {0, 0, 0}, {-1, 0}};
    if (it.unit < 0) return asked;
    asked.tile = tile_of(it.unit);
    asked.tile.token += params.first_row[it.rank];
    if constexpr (kPartOf != PartOf::kRows) {
      if (asked.tile.token < live) {
        asked.choice = read_choice(params.part, asked.tile.token, lane());
      }
    }
    return asked;
  }
  __device__ __forceinline__ Ready ready(const Asked& it) const {
    return {it.work, it.tile, slot_of(params.part, it.choice, lane())};
  }
  __device__ __forceinline__ void make(const Ready& it, Sums& sum) const {
#pragma unroll
    for (float& value : sum) value = 0;
    if (it.tile.token >= live) return;
    // Slots whose rows are under way together; beside every term there are fewer registers for
    // them.
    constexpr int kRows = (kPartOf == PartOf::kAll ? 8 : 16) / static_cast<int>(sizeof(Row));
    const LaneTile tile[1] = {it.tile};
    if constexpr (kPartOf == PartOf::kRows) {
      if (tile[0].columns > 0) load_as<float>(params.part.routed, tile[0].token, tile[0], sum);
    } else if constexpr (kPartOf == PartOf::kSlots) {
      const SlotRows<Row, kRows> slots{params.part, tile, it.slots};
      slots.add(0, params.part.top_k, sum);
      if (tile[0].columns > 0) return;
#pragma unroll
      for (float& value : sum) value = 0;
    } else {
      combine_tile<Row, kRows, Terms::kAll>(params.part, tile, it.slots,
                                            [&](const LaneTile&, const Sums& row) {
#pragma unroll
                                              for (int c = 0; c < kLaneColumns; ++c)
                                                sum[c] = row[c];
                                            });
    }
  }
  __device__ __forceinline__ void store(const Work& it, const Sums& sum) const {
    const int32_t offset = it.unit * kUnitBytes<Part>;
    if (it.rank == windows.rank) {
      cuda::device::store_8(sum, place_in_unit<Part>(params.own + offset));
      if (!params.same_rows) return;
#pragma unroll 1
      for (int32_t step = 1; step < windows.ranks; ++step) {
        const int32_t peer = (windows.rank + step) % windows.ranks;
        store_to_peer<Part>(sum, window::unit_at(windows, epoch, peer, offset));
      }
    } else {
      store_to_peer<Part>(sum, window::unit_at(windows, epoch, it.rank, offset));
    }
  }

  // A peer's units, and this rank's own one turn later: the last of these are made while flags
  // travel. Where all ranks have the same rows each is made once. `sent` is called by all threads
  // of the block when they have stored what peers get.
  template <class Sent>
  __device__ __forceinline__ void make_all(const Sent& sent) const {
    const int32_t own_turns = turns(windows.rank);
    const int32_t places = params.same_rows ? 1 : windows.ranks;  // the last is this rank's own
    const int32_t lag = params.same_rows ? 0 : 1;
    int32_t most = 0;  // turns of peers
    for (int32_t place = 1; place < places; ++place) {
      most = max(most, turns((windows.rank + place) % windows.ranks));
    }
    struct At {
      int32_t turn;
      int32_t place;
    };
    const auto at = [&](const At& it) {
      if (it.place == places) return work(windows.rank, it.turn - lag);
      return work((windows.rank + it.place) % windows.ranks, it.turn);
    };
    const auto after = [&](const At& it) {
      if (it.place < places) return At{it.turn, it.place + 1};
      return At{it.turn + 1, it.turn + 1 < most ? 1 : places};
    };
    At now{0, most > 0 ? 1 : places};
    At later = after(now);
    Ready next = ready(ask(at(now)));
    Asked asked = ask(at(later));
    bool is_sent = false;
#pragma unroll 1
    while (true) {
      const bool ends = now.turn >= most && now.turn - lag >= own_turns;
      const bool peers_are_done = now.turn >= most || (now.turn == most - 1 && now.place == places);
      if (!is_sent && (params.same_rows ? ends : peers_are_done)) {
        sent();
        is_sent = true;
      }
      if (ends) return;
      const Ready it = next;
      now = later;
      later = after(later);
      next = ready(asked);
      asked = ask(at(later));
      if (it.work.unit < 0) continue;
      Sums sum;
      make(it, sum);
      store(it.work, sum);
    }
  }

  // The part of one rank of a unit of this rank's rows.
  __device__ __forceinline__ void load_part(int32_t rank, const Work& it, Sums& values) const {
    const std::byte* const from =
        rank == windows.rank ? params.own : window::arrived(windows, epoch, rank);
    load_arrived<Part>(from + it.unit * kUnitBytes<Part>, values);
  }
  __device__ __forceinline__ void add_up() const {
    const int32_t count = turns(windows.rank);
    const int64_t own_live = params.live_tokens == nullptr ? INT64_MAX : *params.live_tokens;
#pragma unroll 1
    for (int32_t turn = 0; turn < count; turn += kUnitsAhead) {
      Sums sums[kUnitsAhead];
      Work its[kUnitsAhead];
#pragma unroll
      for (int i = 0; i < kUnitsAhead; ++i) {
        its[i] = work(windows.rank, turn + i);
        if (its[i].unit >= 0) load_part(0, its[i], sums[i]);
      }
#pragma unroll 1
      for (int32_t rank = 1; rank < windows.ranks; ++rank) {
        Sums next[kUnitsAhead];
#pragma unroll
        for (int i = 0; i < kUnitsAhead; ++i) {
          if (its[i].unit >= 0) load_part(rank, its[i], next[i]);
        }
#pragma unroll
        for (int i = 0; i < kUnitsAhead; ++i) {
#pragma unroll
          for (int c = 0; c < kLaneColumns; ++c) sums[i][c] = __fadd_rn(sums[i][c], next[i][c]);
        }
      }
#pragma unroll
      for (int i = 0; i < kUnitsAhead; ++i) {
        if (its[i].unit >= 0) finish(tile_of(its[i].unit), own_live, sums[i]);
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
  if (window::await_units(windows, turn.epoch, own_units, differs)) sum.add_up();
  window::finish(windows, turn);
}

}  // namespace conclave::inline v0::dispatch::device
