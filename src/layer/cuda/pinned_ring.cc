#include "layer/cuda/pinned_ring.h"

#include "cuda/check.h"

#include <algorithm>

namespace conclave::inline v0 {

void PinnedRing::Free::operator()(std::byte* data) const noexcept {
  static_cast<void>(cudaFreeHost(data));
}

// A row may be longer than a piece.
PinnedRing::Piece PinnedRing::next(size_t bytes) {
  Slot& slot = slots_[turn_++ % slots_.size()];
  if (slot.memory == nullptr) {
    slot.passed = cuda::make_event();
    slot.bytes = 0;  // a ring that was moved from still says how many it had
  }
  cuda::check(cudaEventSynchronize(slot.passed.get()), "cudaEventSynchronize");
  if (slot.bytes < bytes) {
    slot.memory.reset();
    slot.bytes = 0;
    void* data = nullptr;
    const size_t wanted = std::max(bytes, kPieceBytes);
    cuda::check(cudaMallocHost(&data, wanted), "cudaMallocHost");
    slot.memory.reset(static_cast<std::byte*>(data));
    slot.bytes = wanted;
  }
  return {.memory = slot.memory.get(), .passed = slot.passed.get()};
}

}  // namespace conclave::inline v0
