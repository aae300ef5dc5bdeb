// Prefetches weights ahead of their use.
#pragma once

#include "gemm/cpu/panel_task.h"
#include "gemm/cpu/simd-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

template <int64_t kBytes>
CONCLAVE_KERNEL_INLINE void prefetch_lines(const std::byte* data) {
  for (int64_t line = 0; line < kBytes; line += 64) prefetch_line(data + line);
}

// Prefetches memory to the second-level cache in even shares, one in each of `num_turns` turns:
// prefetches that come together wait for one another, and hold up the loads beside them.
class Ahead {
 public:
  // `bytes` at `data`; null: nothing.
  CONCLAVE_KERNEL_INLINE Ahead(const std::byte* data, int64_t bytes, int64_t num_turns)
      : cursor_(data),
        end_(data == nullptr ? data : data + bytes),
        share_(num_turns > 0 ? bytes / num_turns + 1 : 0) {}

  // Fetches `next` while `data`, of as many bytes, is used from its first to its last. Much data is
  // fetched kDistance ahead of its use, and `next` up to there. Null for `next`: nothing.
  static CONCLAVE_KERNEL_INLINE Ahead along(const std::byte* data, const std::byte* next,
                                            int64_t bytes, int64_t num_turns) {
    Ahead ahead(next, bytes, num_turns);
    if (next == nullptr || bytes <= kMostWhole) return ahead;
    ahead.cursor_ = data + kDistance;
    ahead.end_ = data + bytes;
    ahead.then_ = next;
    return ahead;
  }

  // Fetches `next` while `data` is used from its first to its last `passes` times, each of them in
  // `turns` turns.
  static CONCLAVE_KERNEL_INLINE Ahead during(int64_t passes, const std::byte* data,
                                             const std::byte* next, int64_t bytes, int64_t turns) {
    return passes == 1 ? along(data, next, bytes, turns) : Ahead(next, bytes, turns * passes);
  }

  CONCLAVE_KERNEL_INLINE void turn() {
    for (due_ += share_; due_ > 0; due_ -= 64, cursor_ += 64) {
      if (__builtin_expect(cursor_ >= end_, 0) && !go_on()) return;
      prefetch_line(cursor_);
    }
  }

 private:
  // A core read 17 to 19 GB/s with 4 to 64 KiB between fetch and use, 11 to 13 with 256 (family 6,
  // model 167); below kMostWhole either way is as fast. A strip of a panel that several groups of
  // rows share is used at once: it has to fit in the distance.
  static constexpr int64_t kDistance = 32768;
  static constexpr int64_t kMostWhole = 192 * 1024;

  CONCLAVE_KERNEL_INLINE bool go_on() {
    if (then_ == nullptr) return false;
    cursor_ = then_;
    end_ = then_ + kDistance;
    then_ = nullptr;
    return true;
  }

  const std::byte* cursor_;
  const std::byte* end_;
  const std::byte* then_ = nullptr;
  int64_t share_;
  int64_t due_ = 0;  // bytes that earlier turns left
};

// Fetches a panel some way ahead of its use, line for line, and then the next panel's first lines.
class AlongPanel {
 public:
  // Null for `next`: there is none.
  CONCLAVE_KERNEL_INLINE AlongPanel(const std::byte* panel, const std::byte* next, int64_t bytes)
      : panel_(panel), next_(next == nullptr ? panel : next - bytes), bytes_(bytes) {}

  // While bytes up to `end` are used: what is fetched with byte b is b bytes after this.
  CONCLAVE_KERNEL_INLINE const std::byte* fetched(int64_t end) const {
    return (end + kDistance <= bytes_ ? panel_ : next_) + kDistance;
  }

 private:
  static constexpr int64_t kDistance = 16384;

  const std::byte* panel_;
  const std::byte* next_;
  int64_t bytes_;
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
