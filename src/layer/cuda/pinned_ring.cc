#include "layer/cuda/pinned_ring.h"

#include "cuda/check.h"

namespace conclave::inline v0 {

PinnedRing::Piece PinnedRing::next(size_t bytes) {
  const size_t number = turn_++ % slots_.size();
  Slot& slot = slots_[number];
  if (slot.passed == nullptr) slot.passed = cuda::make_event();
  cuda::check(cudaEventSynchronize(slot.passed.get()), "cudaEventSynchronize");
  if (bytes > kPieceBytes) {
    if (slot.longer.size() < bytes) slot.longer = PinnedMemory(bytes);
    return {.memory = slot.longer.data(), .passed = slot.passed.get()};
  }
  if (pieces_.data() == nullptr) pieces_ = PinnedMemory(slots_.size() * kPieceBytes);
  return {.memory = pieces_.data() + number * kPieceBytes, .passed = slot.passed.get()};
}

}  // namespace conclave::inline v0
