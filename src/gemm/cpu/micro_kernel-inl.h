// Rows times one packed panel: tiles of up to six rows by 64 columns in registers.
#pragma once

#include "gemm/cpu/ahead-inl.h"
#include "gemm/cpu/finish-inl.h"
#include "gemm/cpu/weights-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

inline constexpr int kMaxTileRows = 6;
// Panel rows between two turns of fetching the next panel.
inline constexpr int64_t kStepsPerTurn = 4;

// Vectors of a tile side by side: as many as leave registers for one weight and one activation
// vector (32 registers of 16 lanes with AVX-512, 16 of 8 lanes with AVX2).
template <int kRows>
inline constexpr int kTileVectors = Vec::kLanes == 16 ? 4
                                    : kRows == 1      ? 8
                                    : kRows <= 3      ? 4
                                                      : 2;

template <class Weights, int kRows>
void compute_tile(const PanelTask& task, int64_t first_row, Ahead& ahead) {
  using Activation = typename Weights::Activation;
  constexpr int kVectors = kTileVectors<kRows>;
  constexpr int kPasses = 64 / (kVectors * Vec::kLanes);
  constexpr int64_t kPanelRowBytes = 64 * Weights::kLaneBytes;

  const Activation* rows[kRows];
  for (int r = 0; r < kRows; ++r) {
    const int64_t slot = first_row + r;
    const int64_t row = task.row_index != nullptr ? task.row_index[slot] : slot;
    rows[r] = reinterpret_cast<const Activation*>(task.rows + row * task.row_bytes);
  }
  const int64_t steps = (task.k + Weights::kStepK - 1) / Weights::kStepK;
  alignas(64) float sums[kRows][64];
  for (int pass = 0; pass < kPasses; ++pass) {
    Tile<kRows, kVectors> tile;
    tile.clear();
    const std::byte* panel_row = task.panel;
    for (int64_t begin = 0; begin < steps; begin += kStepsPerTurn) {
      if (pass == 0) ahead.turn();
      const int64_t rest = steps - begin;
      const int64_t end = begin + (rest < kStepsPerTurn ? rest : kStepsPerTurn);
      for (int64_t step = begin; step < end; ++step, panel_row += kPanelRowBytes) {
        Weights::template step<kRows, kVectors>(tile, rows, step * Weights::kStepK, panel_row,
                                                pass);
      }
    }
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) {
        tile.sum[r][j].store(sums[r] + column_of<kVectors>(pass, j));
      }
    }
  }
  finish_tile(task, {.sums = sums[0],
                     .first_row = first_row,
                     .num_rows = kRows,
                     .out = task.out + first_row * task.out_row_bytes,
                     .out_row_bytes = task.out_row_bytes,
                     .out_block_bytes = task.out_block_bytes});
}

// A PanelFunction. Rows are spread evenly over the fewest tiles.
template <class Weights>
void compute_panel(const PanelTask& task) noexcept {
  const int64_t tiles = (task.num_rows + kMaxTileRows - 1) / kMaxTileRows;
  if (tiles == 0) return;
  const int64_t short_rows = task.num_rows / tiles;
  const int64_t num_long = task.num_rows % tiles;
  const int64_t steps = (task.k + Weights::kStepK - 1) / Weights::kStepK;
  const int64_t turns = (steps + kStepsPerTurn - 1) / kStepsPerTurn;
  const int64_t bytes = steps * 64 * Weights::kLaneBytes;
  Ahead ahead = Ahead::during(tiles, task.panel, task.next_panel, bytes, turns);
  int64_t row = 0;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t count = short_rows + (t < num_long ? 1 : 0);
    switch (count) {
      case 1:
        compute_tile<Weights, 1>(task, row, ahead);
        break;
      case 2:
        compute_tile<Weights, 2>(task, row, ahead);
        break;
      case 3:
        compute_tile<Weights, 3>(task, row, ahead);
        break;
      case 4:
        compute_tile<Weights, 4>(task, row, ahead);
        break;
      case 5:
        compute_tile<Weights, 5>(task, row, ahead);
        break;
      default:
        compute_tile<Weights, 6>(task, row, ahead);
        break;
    }
    row += count;
  }
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
