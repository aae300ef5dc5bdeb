// Host memory whose end, or beginning, borders on an unmapped page: one byte too far faults.
#pragma once

#include "conclave/context.h"

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

namespace conclave::testing {

enum class GuardSide : uint8_t { kEnd, kBegin };

// A block of `bytes`, filled with `fill`. With GuardSide::kEnd the block, rounded up to
// `alignment`, ends at the guard; the rounding gap must stay untouched (`gap_intact`).
class GuardedBlock {
 public:
  GuardedBlock(size_t bytes, size_t alignment, GuardSide side, uint8_t fill) : bytes_(bytes) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    padded_ = (bytes + alignment - 1) / alignment * alignment;
    const size_t body = (padded_ + page - 1) / page * page;
    mapped_ = body + 2 * page;
    base_ = static_cast<std::byte*>(
        mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + page, body, PROT_READ | PROT_WRITE) != 0) {
      throw std::bad_alloc();
    }
    data_ = side == GuardSide::kEnd ? base_ + page + body - padded_ : base_ + page;
    std::memset(base_ + page, fill, body);
    fill_ = std::byte{fill};
  }
  GuardedBlock(GuardedBlock&& other) noexcept { *this = std::move(other); }
  GuardedBlock& operator=(GuardedBlock&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(padded_, other.padded_);
    std::swap(mapped_, other.mapped_);
    std::swap(fill_, other.fill_);
    return *this;
  }
  ~GuardedBlock() {
    if (base_ != nullptr) munmap(base_, mapped_);
  }

  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }
  bool gap_intact() const {
    for (size_t i = bytes_; i < padded_; ++i) {
      if (data_[i] != fill_) return false;
    }
    return true;
  }

 private:
  std::byte* base_ = nullptr;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  size_t padded_ = 0;
  size_t mapped_ = 0;
  std::byte fill_{};
};

// Makes every allocation a guarded block, poisoned: nothing may rely on zeroed memory.
class GuardedAllocator final : public HostAllocator {
 public:
  explicit GuardedAllocator(GuardSide side, uint8_t fill = 0xA5) : side_(side), fill_(fill) {}

  void* allocate(size_t bytes, size_t alignment) override {
    GuardedBlock block(bytes, alignment, side_, fill_);
    void* data = block.data();
    const std::lock_guard lock(mutex_);
    blocks_.emplace(data, std::move(block));
    ++allocations_;
    return data;
  }
  void deallocate(void* data, size_t) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(data);
    gaps_intact_ = gaps_intact_ && found->second.gap_intact();
    blocks_.erase(found);
  }

  bool gaps_intact() const { return gaps_intact_; }
  size_t live_blocks() const { return blocks_.size(); }
  int64_t allocations() const { return allocations_; }

 private:
  GuardSide side_;
  uint8_t fill_;
  std::mutex mutex_;
  std::map<void*, GuardedBlock> blocks_;
  bool gaps_intact_ = true;
  int64_t allocations_ = 0;
};

}  // namespace conclave::testing
