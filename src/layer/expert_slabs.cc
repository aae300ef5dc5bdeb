#include "layer/expert_slabs.h"

#include "core/checked.h"
#include "cpu/fresh_memory.h"
#include "cpu/parallel.h"

#include "conclave/error.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

namespace conclave::inline v0 {
namespace {

// Hashes of slabs must not depend on what memory held before.
constexpr size_t kTailBytes = 64;

// Large blocks are copied by all threads, a piece at a time.
void copy_slab(Executor& executor, const std::byte* from, std::byte* to, size_t bytes) {
  constexpr int64_t kPiece = int64_t{4} << 20;
  const int64_t pieces = ceil_div(static_cast<int64_t>(bytes), kPiece);
  cpu::parallel_for(executor, pieces, 1, [&](int64_t begin, int64_t, int32_t) {
    const auto at = static_cast<size_t>(begin * kPiece);
    std::memcpy(to + at, from + at, std::min(bytes - at, static_cast<size_t>(kPiece)));
  });
}

}  // namespace

struct ExpertSlabs::Block {
  cpu::Buffer memory;
  // Whoever finds itself alone may write what others have read before they went.
  std::atomic<int32_t> users{0};
};

ExpertSlabs::ExpertSlabs(HostAllocator& allocator, size_t slab_bytes, size_t places)
    : allocator_(&allocator), slab_bytes_(slab_bytes) {
  const auto bytes = checked_mul(slab_bytes, places);
  if (!bytes) throw Error(ErrorCode::kSizeOverflow, "packed weights do not fit 64 bits");
  const auto block = std::make_shared<Block>();
  block->memory = cpu::Buffer(allocator, *bytes);
  each_.reserve(places);
  for (size_t place = 0; place < places; ++place) {
    std::byte* const slab = block->memory.data() + place * slab_bytes;
    each_.push_back(slab);
    // Slabs end at a multiple of a vector; no packing writes what that leaves behind the last one.
    // Pages that nobody has touched are left to the threads that pack.
    if (cpu::gives_zeros(allocator, *bytes)) continue;
    const size_t tail = std::min(slab_bytes, kTailBytes);
    std::fill_n(slab + slab_bytes - tail, tail, std::byte{});  // a slab may be empty
  }
  if (places > 0) take_block(block);
}

ExpertSlabs& ExpertSlabs::operator=(ExpertSlabs&& other) noexcept {
  if (this == &other) return *this;
  let_go();
  allocator_ = other.allocator_;
  slab_bytes_ = other.slab_bytes_;
  each_ = std::move(other.each_);
  in_a_row_ = other.in_a_row_;
  blocks_ = std::move(other.blocks_);
  return *this;
}

void ExpertSlabs::take_block(const std::shared_ptr<Block>& block) {
  blocks_.push_back(block);
  block->users.fetch_add(1, std::memory_order_relaxed);
}

void ExpertSlabs::let_go() noexcept {
  for (const auto& block : blocks_) block->users.fetch_sub(1, std::memory_order_release);
  blocks_.clear();
}

bool ExpertSlabs::is_shared() const noexcept {
  return std::ranges::any_of(
      blocks_, [](const auto& block) { return block->users.load(std::memory_order_acquire) > 1; });
}

bool ExpertSlabs::keeps_enough(std::span<const int32_t> places) const noexcept {
  size_t bytes = 0;
  for (const auto& block : blocks_) bytes += block->memory.size();
  const auto kept = std::ranges::count_if(places, [](int32_t place) { return place >= 0; });
  return static_cast<size_t>(kept) * slab_bytes_ >= bytes / 4 * 3;
}

ExpertSlabs ExpertSlabs::at_places(std::span<const int32_t> places, HostAllocator& allocator,
                                   Executor& executor) const {
  const bool shares = allocator_ == &allocator && keeps_enough(places);
  const auto is_new = [shares](int32_t place) { return place < 0 || !shares; };
  ExpertSlabs slabs(allocator, slab_bytes_,
                    static_cast<size_t>(std::ranges::count_if(places, is_new)));
  std::vector<std::byte*> all;
  all.reserve(places.size());
  auto next = slabs.each_.begin();
  for (const int32_t place : places) {
    std::byte* const held = place < 0 ? nullptr : each_[static_cast<size_t>(place)];
    if (!is_new(place)) {
      all.push_back(held);
      continue;
    }
    all.push_back(*next++);
    if (held != nullptr) copy_slab(executor, held, all.back(), slab_bytes_);
  }
  slabs.each_ = std::move(all);
  if (!shares) return slabs;
  slabs.in_a_row_ = false;
  for (const auto& block : blocks_) slabs.take_block(block);
  return slabs;
}

void ExpertSlabs::make_own(HostAllocator& allocator, Executor& executor) {
  if (!is_shared()) return;
  ExpertSlabs copy(allocator, slab_bytes_, each_.size());
  for (size_t place = 0; place < each_.size(); ++place) {
    copy_slab(executor, each_[place], copy.each_[place], slab_bytes_);
  }
  *this = std::move(copy);
}

experts::Slabs ExpertSlabs::view() const noexcept {
  if (!in_a_row_) return experts::Slabs(each_.data());
  return each_.empty() ? experts::Slabs() : experts::Slabs(each_.front());
}

}  // namespace conclave::inline v0
