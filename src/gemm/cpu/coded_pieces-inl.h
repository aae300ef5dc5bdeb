// The pieces of k of a panel of codes, for products of bf16 pairs. A pair is that of an even k and
// the next one; where a scale ends between them, its weights have a zero in the other's place.
#pragma once

#include "gemm/cpu/ahead-inl.h"
#include "gemm/cpu/group_numbers-inl.h"
#include "gemm/cpu/segments-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Some k that share all scales: all of them, or what a strip has of them.
struct Piece {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t group = 0;      // the number of the weights' scale
  int64_t row_group = 0;  // that of the rows', if they are codes
  bool begins = false;    // a new sum
  bool ends = false;      // which is scaled

  // Its pairs, and those of them that it has both k of.
  CONCLAVE_KERNEL_INLINE int64_t first_pair() const { return begin / 2; }
  CONCLAVE_KERNEL_INLINE int64_t end_pair() const { return (end + 1) / 2; }
  CONCLAVE_KERNEL_INLINE int64_t first_whole() const { return (begin + 1) / 2; }
  CONCLAVE_KERNEL_INLINE int64_t end_whole() const { return end / 2; }
};

// The pieces of all k in turn, without a division for each.
class Pieces {
 public:
  CONCLAVE_KERNEL_INLINE explicit Pieces(const PanelTask& task)
      : num_k_(task.k),
        width_(task.scale_width),
        row_width_(task.row_scales.first == nullptr ? task.k : task.row_scales.width),
        weights_end_(task.scale_width - task.scale_skip),
        rows_end_(row_width_),
        shared_end_(nearest_end()) {}

  CONCLAVE_KERNEL_INLINE bool done() const { return k_ >= num_k_; }
  CONCLAVE_KERNEL_INLINE int64_t k() const { return k_; }
  // The next one, up to `limit` at most.
  CONCLAVE_KERNEL_INLINE Piece take(int64_t limit) {
    const Piece piece{.begin = k_,
                      .end = lesser(shared_end_, limit),
                      .group = group_,
                      .row_group = row_group_,
                      .begins = k_ == shared_begin_,
                      .ends = shared_end_ <= limit};
    k_ = piece.end;
    if (piece.ends) begin_next();
    return piece;
  }

 private:
  CONCLAVE_KERNEL_INLINE int64_t nearest_end() const {
    return lesser(num_k_, lesser(weights_end_, rows_end_));
  }
  CONCLAVE_KERNEL_INLINE void begin_next() {
    if (k_ == weights_end_) {
      ++group_;
      weights_end_ += width_;
    }
    if (k_ == rows_end_) {
      ++row_group_;
      rows_end_ += row_width_;
    }
    shared_begin_ = k_;
    shared_end_ = nearest_end();
  }

  int64_t num_k_;
  int64_t width_;
  int64_t row_width_;
  int64_t k_ = 0;
  int64_t group_ = 0;
  int64_t row_group_ = 0;
  int64_t weights_end_;
  int64_t rows_end_;
  int64_t shared_begin_ = 0;
  int64_t shared_end_;
};

// How far ahead of its use the panel itself is fetched: decoding leaves no time to wait for it.
inline constexpr int64_t kFetchAheadBytes = 8192;

template <int64_t kBytes>
CONCLAVE_KERNEL_INLINE void fetch_codes(const std::byte* codes) {
  prefetch_lines<kBytes>(codes + kFetchAheadBytes);
}

// Fetches scales, and offsets, that the panel needs when it gets as far as its codes are fetched.
CONCLAVE_KERNEL_INLINE void fetch_scales(const PanelTask& task, const Piece& piece) {
  constexpr int64_t kGroupsAhead = kFetchAheadBytes / 512;
  fetch_numbers(task.scales, piece.group + kGroupsAhead);
  fetch_numbers(task.offsets, piece.group + kGroupsAhead);
}

// Fetches a panel of codes with its scales and offsets.
CONCLAVE_KERNEL_INLINE Ahead fetch_panel(const PanelTask& task, int64_t turns, int64_t passes) {
  return Ahead::during(passes, task.panel, task.next_panel, task.panel_bytes, turns);
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
