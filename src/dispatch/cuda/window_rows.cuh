// The kernel of rows of all ranks. A warp makes a piece of a block of bytes, stores it to every
// peer, and later takes the same pieces of what they have stored.
#pragma once

#include "comm/nccl/window_parts.cuh"
#include "comm/nccl/window_units.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/vector16.cuh"
#include "dispatch/cuda/rank_rows.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::dispatch::device {

namespace window = comm::window;

inline constexpr int kRowThreads = 512;
inline constexpr int kRowWarps = kRowThreads / 32;
// A lane has so many vectors of 16 bytes of a piece, 512 bytes apart.
inline constexpr int kVectors = 2;
inline constexpr int kVectorBytes = 16;
inline constexpr int64_t kPieceBytes = int64_t{kVectors} * 32 * kVectorBytes;

struct WindowRowParams {
  PackRankRows pack;
  bool aligned;   // rows begin at multiples of 16 bytes
  bool is_there;  // rows are in their blocks already
  std::byte* blocks;
  int32_t* topk_ids;  // those of all ranks
  float* topk_weights;
  int32_t* marks;
  int64_t pieces;  // a block has so many
  int64_t first_row[comm::kMaxWindowRanks];
  int64_t rows[comm::kMaxWindowRanks];
};

union RowVector {
  uint4 bits;
  uint32_t words[4];
};

// A piece lies in a row of its rank, at the byte of its block where the lane begins.
struct RowPiece {
  int64_t row;
  int64_t byte;
};

// From is what the caller's rows are, To what travels; both are the same where rows are there.
template <class From, class To>
struct WindowRow {
  const comm::WindowParams& windows;
  const WindowRowParams& params;
  uint32_t epoch;
  int32_t warp;

  __device__ __forceinline__ RowPiece piece_of(int64_t unit) const {
    // No message has 2^32 pieces, and a division of 64 bits takes as long as a load.
    const int64_t row = static_cast<uint32_t>(unit) / static_cast<uint32_t>(params.pieces);
    return {row, (unit - row * params.pieces) * kPieceBytes + threadIdx.x % 32 * kVectorBytes};
  }

  // The words behind the row: ids, weights, a mark.
  __device__ __forceinline__ uint32_t choice(int64_t row, int32_t at) const {
    const PackRankRows& pack = params.pack;
    const int32_t top_k = pack.form.top_k;
    const bool live = pack.live_rows == nullptr || row < *pack.live_rows;
    if (at < top_k) return live ? static_cast<uint32_t>(pack.topk_ids[row * top_k + at]) : ~0U;
    if (!live) return 0;
    if (at < 2 * top_k) return __float_as_uint(pack.topk_weights[row * top_k + at - top_k]);
    if (pack.form.mark == 0 || at > 2 * top_k) return 0;
    return static_cast<uint32_t>(pack.marks == nullptr ? pack.mark : pack.marks[row]);
  }
  // `row` is among all.
  __device__ __forceinline__ void take_choice(int64_t row, int32_t at, uint32_t word) const {
    const RankRowForm& form = params.pack.form;
    if (at < form.top_k) {
      params.topk_ids[row * form.top_k + at] = static_cast<int32_t>(word);
    } else if (at < 2 * form.top_k) {
      params.topk_weights[row * form.top_k + at - form.top_k] = __uint_as_float(word);
    } else if (at == 2 * form.top_k && form.mark != 0) {
      params.marks[row] = static_cast<int32_t>(word);
    }
  }
  // Calls visit(word of the vector, number of the choice) for those behind the row.
  template <class Visit>
  __device__ __forceinline__ void for_choices(int64_t byte, const Visit& visit) const {
    const int64_t ids = params.pack.form.ids;
    if (byte + kVectorBytes <= ids) return;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int64_t at = byte + 4 * w - ids;
      if (at >= 0) visit(w, static_cast<int32_t>(at / 4));
    }
  }

  __device__ __forceinline__ RowVector of_row(const RowPiece& piece) const {
    const PackRankRows& pack = params.pack;
    RowVector vector;
    if (params.is_there) {
      vector.bits = __ldcg(
          reinterpret_cast<const uint4*>(pack.out + piece.row * pack.form.bytes + piece.byte));
      return vector;
    }
    constexpr int kCount = kVectorBytes / static_cast<int>(sizeof(To));
    const int64_t column = piece.byte / static_cast<int64_t>(sizeof(To));
    const From* const from =
        static_cast<const From*>(pack.rows) + piece.row * pack.row_stride + column;
    const int64_t left = pack.form.columns - column;
    if constexpr (sizeof(To) == 2) {
      if (params.aligned && left >= kCount) {
        float x[kCount];
        cuda::device::load_8(from, x);
        cuda::device::store_8(x, reinterpret_cast<To*>(&vector));
        return vector;
      }
    }
    To* const to = reinterpret_cast<To*>(&vector);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float x = i < left ? cuda::device::widen(from[i]) : 0.0F;
      to[i] = cuda::device::narrow<To>(x);
    }
    return vector;
  }

  // A vector of this rank's own rows, for all.
  __device__ __forceinline__ RowVector make(const RowPiece& piece) const {
    RowVector vector{};
    if (piece.byte < params.pack.form.ids) vector = of_row(piece);
    for_choices(piece.byte, [&](int w, int32_t at) {
      vector.words[w] = choice(piece.row, at);
      take_choice(params.first_row[windows.rank] + piece.row, at, vector.words[w]);
    });
    return vector;
  }

  __device__ __forceinline__ int64_t units(int32_t rank) const {
    return params.rows[rank] * params.pieces;
  }

  __device__ __forceinline__ void send() const {
    const RankRowForm& form = params.pack.form;
    const window::Units share = window::units_of(windows, units(windows.rank));
#pragma unroll 1
    for (int64_t unit = share.begin + warp; unit < share.end; unit += kRowWarps) {
      RowPiece piece = piece_of(unit);
#pragma unroll
      for (int v = 0; v < kVectors; ++v, piece.byte += 32 * kVectorBytes) {
        if (piece.byte >= form.bytes) break;
        const RowVector vector = make(piece);
        const int64_t offset = piece.row * form.bytes + piece.byte;
#pragma unroll 1
        for (int32_t step = 1; step < windows.ranks; ++step) {
          const int32_t peer = (windows.rank + step) % windows.ranks;
          *reinterpret_cast<uint4*>(window::unit_at(windows, epoch, peer, offset)) = vector.bits;
        }
        if (!params.is_there && piece.byte < form.ids) {
          *reinterpret_cast<uint4*>(params.pack.out + offset) = vector.bits;
        }
      }
    }
  }

  __device__ __forceinline__ void take_from(int32_t peer) const {
    const RankRowForm& form = params.pack.form;
    const std::byte* const from = window::arrived(windows, epoch, peer);
    std::byte* const to = params.blocks + params.first_row[peer] * form.bytes;
    const window::Units share = window::units_of(windows, units(peer));
#pragma unroll 1
    for (int64_t unit = share.begin + warp; unit < share.end; unit += kRowWarps) {
      RowPiece piece = piece_of(unit);
      RowVector vectors[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int64_t byte = piece.byte + v * 32 * kVectorBytes;
        if (byte >= form.bytes) continue;
        vectors[v].bits =
            __ldcg(reinterpret_cast<const uint4*>(from + piece.row * form.bytes + byte));
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v, piece.byte += 32 * kVectorBytes) {
        if (piece.byte >= form.bytes) break;
        if (piece.byte < form.ids) {
          *reinterpret_cast<uint4*>(to + piece.row * form.bytes + piece.byte) = vectors[v].bits;
        }
        for_choices(piece.byte, [&](int w, int32_t at) {
          take_choice(params.first_row[peer] + piece.row, at, vectors[v].words[w]);
        });
      }
    }
  }
};

template <class From, class To>
__global__ void __launch_bounds__(kRowThreads, 1)
    window_row_kernel(const __grid_constant__ comm::WindowParams windows,
                      const __grid_constant__ WindowRowParams params) {
  __shared__ int differs;
  cuda::device::grid_dependency_wait();
  const window::Turn turn = window::begin_turn(windows);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread == 0) differs = 0;
  window::say_claims(windows, turn.epoch);
  const WindowRow<From, To> rows{windows, params, turn.epoch, thread / 32};
  rows.send();
  __syncthreads();
  if (thread < windows.ranks && thread != windows.rank) {
    window::raise_flag_of_units(windows, turn.epoch, thread, rows.units(windows.rank));
  }
  window::mark_turn(windows);
  const auto units = [&](int32_t peer) { return rows.units(peer); };
  const bool came = window::await_units(windows, turn.epoch, units, differs);
  cuda::device::grid_launch_dependents();
  if (came) {
#pragma unroll 1
    for (int32_t step = 1; step < windows.ranks; ++step) {
      rows.take_from((windows.rank + step) % windows.ranks);
    }
  }
  window::finish(windows, turn);
}

}  // namespace conclave::inline v0::dispatch::device
