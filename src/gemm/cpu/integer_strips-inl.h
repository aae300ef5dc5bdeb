// The loops of integer_kernel-inl.h for many rows: groups of rows share strips of interleaved
// weights. What a group is, and how it multiplies a strip, is up to the including file.
#pragma once

#include "gemm/cpu/quad_strip-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Rows that share a strip; no block of a work list has more.
inline constexpr int64_t kMaxStripRows = 96;

// Rows of a task and their sums, in the order of quads' lanes: of a segment that the next strip
// continues, without what the offset of weights adds, and of all segments before.
template <int kMostRows>
struct IntegerGroup {
  int64_t first_row = 0;
  int num_rows = 0;
  const std::byte* codes[kMostRows] = {};
  const float* scales[kMostRows] = {};
  const int32_t* sums[kMostRows] = {};  // one for each segment
  alignas(64) int32_t partial[kMostRows][64];
  alignas(64) float totals[kMostRows * 64];

  CONCLAVE_KERNEL_INLINE void begin(const PanelTask& task, int64_t row, int count) {
    first_row = row;
    num_rows = count;
    for (int r = 0; r < count; ++r) {
      const CodeRows<1> one(task, row + r);
      codes[r] = one.codes[0];
      scales[r] = one.scales[0];
      sums[r] = one.sums[0];
      for (int c = 0; c < 64; c += Vec::kLanes) Vec::zero().store(totals + r * 64 + c);
    }
  }
  // The finished sums of a segment go to the totals.
  template <class Weights>
  CONCLAVE_KERNEL_INLINE void end_segment(const SegmentWalk& segment, const float* weight_scales) {
    for (int r = 0; r < num_rows; ++r) {
      const Ints added = Ints::broadcast(-Weights::kOffset * sums[r][segment.segment()]);
      const Vec row_scale = Vec::broadcast(scales[r][segment.rows_group()]);
      for (int c = 0; c < 64; c += Vec::kLanes) {
        const Ints sum = Ints::add(Ints::load(partial[r] + c), added);
        add_scaled<Weights>(totals + r * 64 + c, sum, row_scale, weight_scales + c);
      }
    }
  }
};

// At most kMaxStripRows rows of a task. `Multiplier` names its groups' rows, the k on whose
// multiples its strips begin and end, and adds a strip's products to a group's partial sums.
template <class Weights, class Multiplier>
class StripRows {
  using Strip = QuadStrip<Weights>;
  static constexpr int kRows = Multiplier::kRows;
  static constexpr int64_t kStep = Multiplier::kStepK;

 public:
  CONCLAVE_KERNEL_INLINE StripRows(const PanelTask& task, int64_t first_row, int64_t num_rows)
      : task_(task) {
    for (int64_t row = 0; row < num_rows; row += kRows) {
      const int64_t rest = num_rows - row;
      groups_[count_++].begin(task, first_row + row, static_cast<int>(rest < kRows ? rest : kRows));
    }
  }

  CONCLAVE_KERNEL_INLINE void multiply(Multiplier& multiplier, Ahead& ahead) {
    for (SegmentWalk walk(groups_of(task_), task_.row_scales); !walk.done(); walk.next()) {
      const int64_t first = walk.begin() / kStep * kStep;
      const int64_t last = (walk.end() + kStep - 1) / kStep * kStep;
      for (int64_t k = first; k < last; k += Strip::kK) {
        const int64_t end = k + Strip::kK < last ? k + Strip::kK : last;
        strip_.fill(task_, k, end, walk.begin(), walk.end(), ahead);
        for (int g = 0; g < count_; ++g) {
          multiplier.add_strip(task_, strip_, {.begin = k, .end = end, .begins = k == first},
                               groups_[g]);
        }
      }
      end_segment(walk);
    }
  }
  CONCLAVE_KERNEL_INLINE void finish() {
    for (int g = 0; g < count_; ++g) {
      IntegerGroup<kRows>& group = groups_[g];
      finish_integer_rows<Weights>(task_, group.first_row, group.num_rows, group.totals);
    }
  }

 private:
  CONCLAVE_KERNEL_INLINE void end_segment(const SegmentWalk& segment) {
    alignas(64) float room[64];
    alignas(64) float scales[64];
    const float* const stored = numbers_of(task_.scales, segment.weights_group(), room);
    for (int column = 0; column < 64; column += kSliceColumns) {
      reorder<Weights>(stored + column, scales + column);
    }
    for (int g = 0; g < count_; ++g) groups_[g].template end_segment<Weights>(segment, scales);
  }

  const PanelTask& task_;
  IntegerGroup<kRows> groups_[(kMaxStripRows + kRows - 1) / kRows];
  Strip strip_;
  int count_ = 0;
};

template <class Weights, class Multiplier>
CONCLAVE_KERNEL_INLINE void compute_by_strips(const PanelTask& task, Multiplier& multiplier) {
  const int64_t blocks = (task.num_rows + kMaxStripRows - 1) / kMaxStripRows;
  const int64_t turns = (task.k + 4 * kQuadsPerTurn - 1) / (4 * kQuadsPerTurn);
  Ahead ahead(task.next_panel, task.k * Weights::kRowBytes, turns * blocks);
  for (int64_t row = 0; row < task.num_rows; row += kMaxStripRows) {
    const int64_t rest = task.num_rows - row;
    StripRows<Weights, Multiplier> rows(task, row, rest < kMaxStripRows ? rest : kMaxStripRows);
    rows.multiply(multiplier, ahead);
    rows.finish();
  }
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
