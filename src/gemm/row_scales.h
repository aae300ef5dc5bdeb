// Scales of rows of activations that are codes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace conclave::inline v0::gemm {

// Rows hold the float32 values of their codes, or the codes. Each row has its scales at the same
// place.
struct RowScales {
  const std::byte* first = nullptr;  // float32 scales of the first row; null: rows are plain
  int64_t width = 0;                 // neighbouring k that share one
  // Products that are whole numbers are added up from one multiple of this k to the next at most,
  // which float32 does exactly; then any order of additions gives the same sum.
  int64_t exact_k = std::numeric_limits<int64_t>::max();
  // Bytes from a row's scales to the sums of its codes, an int32 for each segment; where rows are
  // codes, or weights have offsets.
  int64_t sums_at = 0;

  const float* of_row(int64_t row, int64_t row_bytes) const noexcept {
    return static_cast<const float*>(static_cast<const void*>(first + row * row_bytes));
  }
  const int32_t* sums_of_row(int64_t row, int64_t row_bytes) const noexcept {
    return static_cast<const int32_t*>(static_cast<const void*>(first + row * row_bytes + sums_at));
  }
};

// Neighbouring k of a matrix share scales, `skip` fewer in the first group: its panel begins inside
// one if it is a slice.
struct WeightGroups {
  int64_t k = 0;
  int64_t width = 0;
  int64_t skip = 0;
};

// The end of the segment that begins at `begin`: products of codes are added up over k that share
// both scales. Files of any instruction set call it, and none may leave a copy behind.
[[gnu::always_inline]] inline int64_t segment_end(const WeightGroups& groups, const RowScales& rows,
                                                  int64_t begin) {
  int64_t end = ((begin + groups.skip) / groups.width + 1) * groups.width - groups.skip;
  const int64_t row_end = (begin / rows.width + 1) * rows.width;
  const int64_t exact_end =
      begin < rows.exact_k ? rows.exact_k : (begin / rows.exact_k + 1) * rows.exact_k;
  if (row_end < end) end = row_end;
  if (exact_end < end) end = exact_end;
  return groups.k < end ? groups.k : end;
}

// Goes through a panel's segments without a division for each.
class SegmentWalk {
 public:
  [[gnu::always_inline]] SegmentWalk(const WeightGroups& groups, const RowScales& rows)
      : groups_(groups),
        rows_(rows),
        weights_end_(groups.width - groups.skip),
        rows_end_(rows.width),
        exact_end_(rows.exact_k) {
    cut();
  }

  [[gnu::always_inline]] bool done() const { return begin_ >= groups_.k; }
  [[gnu::always_inline]] void next() {
    begin_ = end_;
    ++segment_;
    if (begin_ == weights_end_) {
      weights_end_ += groups_.width;
      ++weights_group_;
    }
    if (begin_ == rows_end_) {
      rows_end_ += rows_.width;
      ++rows_group_;
    }
    if (begin_ == exact_end_) exact_end_ += rows_.exact_k;
    cut();
  }

  [[gnu::always_inline]] int64_t begin() const { return begin_; }
  [[gnu::always_inline]] int64_t end() const { return end_; }
  [[gnu::always_inline]] int64_t segment() const { return segment_; }
  [[gnu::always_inline]] int64_t weights_group() const { return weights_group_; }
  [[gnu::always_inline]] int64_t rows_group() const { return rows_group_; }

 private:
  [[gnu::always_inline]] void cut() {
    end_ = groups_.k;
    if (weights_end_ < end_) end_ = weights_end_;
    if (rows_end_ < end_) end_ = rows_end_;
    if (exact_end_ < end_) end_ = exact_end_;
  }

  WeightGroups groups_;
  RowScales rows_;
  int64_t weights_end_;
  int64_t rows_end_;
  int64_t exact_end_;
  int64_t begin_ = 0;
  int64_t end_ = 0;
  int64_t segment_ = 0;
  int64_t weights_group_ = 0;
  int64_t rows_group_ = 0;
};

}  // namespace conclave::inline v0::gemm
