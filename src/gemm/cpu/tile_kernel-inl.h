// Groups of 16 rows times one packed bf16 panel, on tile registers.
#pragma once

#include "gemm/cpu/ahead-inl.h"
#include "gemm/cpu/tile_groups-inl.h"
#include "gemm/cpu/wide_rows-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Groups that share a strip of weights, whose sums wait in the second-level cache meanwhile.
inline constexpr int64_t kMaxTileGroups = 16;

// Values of k that all groups multiply before the next ones. The weights of a strip stay in the
// first-level cache, so that all groups but the first load them from there, and activations from
// the second-level one. Where sums find room beside them, strips are shorter; one group needs none.
CONCLAVE_KERNEL_INLINE int64_t strip_k(int64_t groups, int64_t k) {
  if (groups == 1) return k;
  return groups <= 6 ? 128 : 256;
}

// Two groups as one: tiles of two by two multiply half of the columns at once.
struct PairOfGroups {
  const std::byte* first;  // rows
  const std::byte* second;
  float* first_sums;  // half of the columns have these
  float* second_sums;

  CONCLAVE_KERNEL_INLINE void load() const {
    _tile_loadd(0, first_sums, kSumRowBytes);
    _tile_loadd(1, first_sums + 16, kSumRowBytes);
    _tile_loadd(2, second_sums, kSumRowBytes);
    _tile_loadd(3, second_sums + 16, kSumRowBytes);
  }
  CONCLAVE_KERNEL_INLINE void store() const {
    _tile_stored(0, first_sums, kSumRowBytes);
    _tile_stored(1, first_sums + 16, kSumRowBytes);
    _tile_stored(2, second_sums, kSumRowBytes);
    _tile_stored(3, second_sums + 16, kSumRowBytes);
  }
};

// Rows of the tiles of two groups, which are set anew only if they differ.
class ConfiguredRows {
 public:
  CONCLAVE_KERNEL_INLINE void set(int64_t first, int64_t second) {
    if (first == first_ && second == second_) return;
    configure_tiles(static_cast<int>(first), static_cast<int>(second));
    first_ = first;
    second_ = second;
  }

 private:
  int64_t first_ = 0;
  int64_t second_ = 0;
};

// k of [begin, end) of a panel.
struct Strip {
  int64_t begin;
  int64_t end;

  CONCLAVE_KERNEL_INLINE const std::byte* weights(const PanelTask& task) const {
    return task.panel + begin / 2 * kPairRowBytes;
  }
  CONCLAVE_KERNEL_INLINE const std::byte* rows(const PanelTask& task, int64_t group) const {
    return task.rows + group * kTileRows * task.row_bytes + begin * kTileRowBytes / 2;
  }
};

// Adds a strip of one group: all 64 columns, with four accumulators for each tile of rows.
CONCLAVE_KERNEL_INLINE void add_strip(const PanelTask& task, int64_t group, const Strip& strip,
                                      Ahead& ahead, GroupSums& sums) {
  const std::byte* x = strip.rows(task, group);
  const std::byte* w = strip.weights(task);
  if (strip.begin == 0) {
    clear_sums();
  } else {
    load_sums(sums.value[0]);
  }
  for (int64_t k = strip.begin; k < strip.end; k += kTileK) {
    ahead.turn();
    _tile_loadd(4, x, kTileRowBytes);
    _tile_loadd(6, w, kPairRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + 64, kPairRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, w + 128, kPairRowBytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, w + 192, kPairRowBytes);
    _tile_dpbf16ps(3, 4, 7);
    x += kTileBytes;
    w += kTilePairs * kPairRowBytes;
  }
  store_sums(sums.value[0]);
}

// Adds a strip of two groups: 32 columns from `column` on.
CONCLAVE_KERNEL_INLINE void add_strip_of_pair(const PanelTask& task, int64_t group,
                                              const Strip& strip, int64_t column, Ahead& ahead,
                                              GroupSums* sums) {
  const PairOfGroups pair{.first = strip.rows(task, group),
                          .second = strip.rows(task, group + 1),
                          .first_sums = sums[0].value[0] + column,
                          .second_sums = sums[1].value[0] + column};
  const std::byte* w = strip.weights(task) + column * 4;
  if (strip.begin == 0) {
    clear_sums();
  } else {
    pair.load();
  }
  int64_t x = 0;
  for (int64_t k = strip.begin; k < strip.end; k += kTileK) {
    ahead.turn();
    _tile_loadd(6, w, kPairRowBytes);
    _tile_loadd(4, pair.first + x, kTileRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + 64, kPairRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, pair.second + x, kTileRowBytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    x += kTileBytes;
    w += kTilePairs * kPairRowBytes;
  }
  pair.store();
}

// Groups [first, first + count), at most kMaxTileGroups, of which the last may have fewer rows.
inline void compute_groups(const PanelTask& task, int64_t first, int64_t count, Ahead& ahead) {
  GroupSums sums[kMaxTileGroups];
  const int64_t share = strip_k(count, task.k);
  const int64_t last_rows = rows_of_group(task, first + count - 1);
  ConfiguredRows configured;
  // Without any k, sums are zeros.
  int64_t begin = 0;
  do {
    const Strip strip{.begin = begin, .end = lesser(task.k, begin + share)};
    int64_t group = 0;
    for (; group + 2 <= count; group += 2) {
      configured.set(kTileRows, group + 2 < count ? kTileRows : last_rows);
      add_strip_of_pair(task, first + group, strip, 0, ahead, sums + group);
      add_strip_of_pair(task, first + group, strip, 32, ahead, sums + group);
    }
    if (group < count) {
      configured.set(last_rows, last_rows);
      add_strip(task, first + group, strip, ahead, sums[group]);
    }
    begin = strip.end;
  } while (begin < task.k);
  for (int64_t g = 0; g < count; ++g) {
    finish_group(task, first + g, rows_of_group(task, first + g), sums[g]);
  }
}

// A PanelFunction; rows come in groups (tiles-inl.h), without an index.
inline void compute_panel_on_tiles(const PanelTask& task) noexcept {
  if (task.num_rows <= kMaxWideRows) {
    if (task.num_rows > 0) call_for<kMaxWideRows>(task.num_rows, ComputeWidePanel{task});
    return;
  }
  const int64_t steps = (task.k + kTileK - 1) / kTileK;
  const int64_t groups = (task.num_rows + kTileRows - 1) / kTileRows;
  Ahead ahead =
      Ahead::along(task.panel, task.next_panel, steps * kTilePairs * kPairRowBytes, steps * groups);
  for (int64_t first = 0; first < groups; first += kMaxTileGroups) {
    compute_groups(task, first, lesser(kMaxTileGroups, groups - first), ahead);
  }
  _tile_release();
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
