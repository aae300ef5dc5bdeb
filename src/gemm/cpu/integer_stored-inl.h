// The arithmetic and the bits of integer_kernel-inl.h for formats whose codes cost more to bring
// into quads than stored quads cost to load: with more than two tiles of rows, the first one stores
// quads for the others.
#pragma once

#include "gemm/cpu/quad_strip-inl.h"
#include "gemm/cpu/segments-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Rows that share stored quads, and whose sums lie beside them; no block of a work list has more.
inline constexpr int64_t kMaxStoredRows = 96;

// Whole segments of a panel, as many as fit: their quads, which begin anew with each, and scales in
// the order of lanes.
template <class Weights>
class StoredSegments {
 public:
  static constexpr int64_t kK = 256;
  static bool fit(const PanelTask& task) { return lesser(task.scale_width, task.k) <= kK; }

  // Takes the next ones, without quads.
  CONCLAVE_KERNEL_INLINE void take(const PanelTask& task, SegmentWalk& walk) {
    count_ = 0;
    for (int64_t end = 0; !walk.done() && count_ < kMost; walk.next()) {
      const int64_t length = walk.end() - walk.begin();
      if (end + length > kK) return;
      segments_[count_] = {.begin = walk.begin(),
                           .end = walk.end(),
                           .number = walk.segment(),
                           .rows_group = walk.rows_group(),
                           .quads = end / 4};
      alignas(64) float room[64];
      const float* const scales = numbers_of(task.scales, walk.weights_group(), room);
      for (int column = 0; column < 64; column += kSliceColumns) {
        reorder<Weights>(scales + column, scales_[count_] + column);
      }
      ++count_;
      end += (length + 3) / 4 * 4;
    }
  }

  // Adds their products to the totals of the first rows, and stores quads.
  template <int kRows>
  CONCLAVE_KERNEL_INLINE void fill(const PanelTask& task, const CodeRows<kRows>& rows,
                                   float* totals, Ahead& ahead) {
    add<kRows>(
        rows, totals,
        [&](const Segment& segment, int64_t k, int slice, int32_t* quads)
            __attribute__((always_inline)) {
              if (((k - segment.begin) & (4 * kQuadsPerTurn - 1)) == 0) ahead.turn();
              const std::byte* const codes = task.panel + k * Weights::kRowBytes;
              const int64_t rest = segment.end - k;
              const Quads loaded = __builtin_expect(rest >= 4, 1)
                                       ? load_quads<Weights>(codes, slice)
                                       : load_some_quads<Weights>(codes, 0, rest, slice);
#pragma GCC unroll 4
              for (int j = 0; j < 4; ++j) loaded.value[j].store(quads + j * Vec::kLanes);
              return loaded;
            });
  }
  // The same of other rows, by stored quads.
  template <int kRows>
  CONCLAVE_KERNEL_INLINE void add_to(const CodeRows<kRows>& rows, float* totals) {
    add<kRows>(
        rows, totals,
        [](const Segment&, int64_t, int, const int32_t* quads) __attribute__((always_inline)) {
          Quads loaded;
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) loaded.value[j] = Ints::load(quads + j * Vec::kLanes);
          return loaded;
        });
  }

 private:
  static constexpr int64_t kMost = kK / 4;
  struct Segment {
    int64_t begin = 0;
    int64_t end = 0;
    int64_t number = 0;
    int64_t rows_group = 0;
    int64_t quads = 0;  // the place of its first
  };

  // load(segment, k, slice, quads): those from k on, which are stored at `quads`.
  template <int kRows, class Load>
  CONCLAVE_KERNEL_INLINE void add(const CodeRows<kRows>& rows, float* totals, const Load& load) {
    for (int64_t s = 0; s < count_; ++s) {
      const Segment segment = segments_[s];
#pragma GCC unroll 2
      for (int slice = 0; slice < Quads::kSlices; ++slice) {
        IntegerTile<Weights, kRows> tile;
        tile.begin(rows, segment.number);
        const int column = slice * kSliceColumns;
        int32_t* quads = quads_[segment.quads] + column;
        for (int64_t k = segment.begin; k < segment.end; k += 4, quads += 64) {
          tile.multiply_add(rows, k, load(segment, k, slice, quads));
        }
        tile.add_to(totals + column, rows, segment.rows_group, scales_[s] + column);
      }
    }
  }

  alignas(64) int32_t quads_[kK / 4][64];
  alignas(64) float scales_[kMost][64];
  Segment segments_[kMost];
  int64_t count_ = 0;
};

// A tile of rows, from `first_row` of the task on.
template <class Weights>
struct StoredTile {
  const PanelTask& task;
  StoredSegments<Weights>& segments;
  Ahead& ahead;
  int64_t first_row;
  float* totals;
  bool fills;

  template <int kRows>
  CONCLAVE_KERNEL_INLINE void call() const {
    fills ? fill<kRows>(*this) : add<kRows>(*this);
  }

 private:
  template <int kRows>
  static void fill(const StoredTile& of) {
    of.segments.fill(of.task, CodeRows<kRows>(of.task, of.first_row), of.totals, of.ahead);
  }
  template <int kRows>
  static void add(const StoredTile& of) {
    of.segments.add_to(CodeRows<kRows>(of.task, of.first_row), of.totals);
  }
};

// Rows [first, first + count), at most kMaxStoredRows.
template <class Weights>
void compute_stored(const PanelTask& task, int64_t first, int64_t count, Ahead& ahead) {
  alignas(64) float totals[kMaxStoredRows * 64];
  for (int64_t i = 0; i < count * 64; i += Vec::kLanes) Vec::zero().store(totals + i);
  const int64_t tiles = (count + kMaxIntegerTileRows - 1) / kMaxIntegerTileRows;
  StoredSegments<Weights> segments;
  for (SegmentWalk walk(groups_of(task), task.row_scales); !walk.done();) {
    segments.take(task, walk);
    for (int64_t t = 0, row = 0; t < tiles; ++t) {
      const int64_t rows = count / tiles + (t < count % tiles ? 1 : 0);
      with_rows<kMaxIntegerTileRows>(
          rows, StoredTile<Weights>{task, segments, ahead, first + row, totals + row * 64, t == 0});
      row += rows;
    }
  }
  finish_integer_rows<Weights>(task, first, count, totals);
}

// A PanelFunction for rows of codes.
template <class Format>
struct IntegerPanelByStored {
  static void compute(const PanelTask& task) noexcept {
    using Weights = WholeWeights<Format>;
    if constexpr (!Weights::kStoresQuads) {
      return IntegerPanel<Format>::compute(task);
    } else {
      // Two tiles bring them into quads anew in the time that storing them takes.
      const bool are_few = task.num_rows <= 2 * kMaxIntegerTileRows;
      if (are_few || !StoredSegments<Weights>::fit(task)) {
        return IntegerPanel<Format>::compute(task);
      }
      const int64_t blocks = (task.num_rows + kMaxStoredRows - 1) / kMaxStoredRows;
      const int64_t turns = (task.k + 4 * kQuadsPerTurn - 1) / (4 * kQuadsPerTurn);
      Ahead ahead = Ahead::during(blocks, task.panel, task.next_panel, task.panel_bytes, turns);
      for (int64_t row = 0; row < task.num_rows; row += kMaxStoredRows) {
        compute_stored<Weights>(task, row, lesser(kMaxStoredRows, task.num_rows - row), ahead);
      }
    }
  }
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
