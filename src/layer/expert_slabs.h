// The slabs of one matrix of a kind of experts, one for each place. They lie in blocks of memory,
// which layers share that have the same experts: one that is taken to other ranks moves no bytes of
// what it keeps.
#pragma once

#include "cpu/memory.h"
#include "experts/kernel.h"

#include "conclave/context.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace conclave::inline v0 {

class ExpertSlabs {
 public:
  ExpertSlabs() = default;
  // Unfilled, one slab behind the other. Throws Error: kOutOfMemory, kSizeOverflow.
  ExpertSlabs(HostAllocator& allocator, size_t slab_bytes, size_t places);
  ExpertSlabs(ExpertSlabs&&) noexcept = default;
  ExpertSlabs& operator=(ExpertSlabs&& other) noexcept;
  ~ExpertSlabs() { let_go(); }

  // The same memory under `places` of these, with new memory where that is -1. Where more than a
  // quarter of it would serve nobody, or it comes from another allocator, everything is copied.
  ExpertSlabs at_places(std::span<const int32_t> places, HostAllocator& allocator,
                        Executor& executor) const;
  // Becomes the only one that has this memory, by a copy if there are others. From then on its
  // bytes may be changed.
  void make_own(HostAllocator& allocator, Executor& executor);
  bool is_shared() const noexcept;

  size_t slab_bytes() const noexcept { return slab_bytes_; }
  std::span<std::byte* const> each() const noexcept { return each_; }
  // For kernels; valid until this is assigned to.
  experts::Slabs view() const noexcept;

 private:
  struct Block;

  bool keeps_enough(std::span<const int32_t> places) const noexcept;
  void take_block(const std::shared_ptr<Block>& block);
  void let_go() noexcept;

  HostAllocator* allocator_ = nullptr;
  size_t slab_bytes_ = 0;
  std::vector<std::byte*> each_;  // [places]
  bool in_a_row_ = true;          // one right behind the other
  std::vector<std::shared_ptr<Block>> blocks_;
};

}  // namespace conclave::inline v0
