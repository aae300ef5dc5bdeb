// Pinned memory through which weights of the host reach a device, in pieces: one is filled while
// others are on their way.
#pragma once

#include "cuda/stream.h"
#include "layer/cuda/pinned_memory.h"

#include <array>
#include <cstddef>
#include <cuda_runtime_api.h>

namespace conclave::inline v0 {

// Pins nothing before it is asked for. Serves one thread.
class PinnedRing {
 public:
  // Each thread that fills one has its own ring. A piece stays in a core's own cache until the
  // device has read it, and hides a copy's start-up: of 512 KiB an H200 reads 43 GB/s, of 1 MiB 48.
  // Two of these are a huge page.
  static constexpr size_t kPieceBytes = size_t{1} << 20;

  struct Piece {
    std::byte* memory = nullptr;
    cudaEvent_t passed = nullptr;  // to be recorded behind the copy
  };
  // A piece of at least `bytes` whose last copy has finished; valid until the next call.
  Piece next(size_t bytes = kPieceBytes);

 private:
  struct Slot {
    PinnedMemory longer;  // for rows that are longer than a piece
    cuda::OwnedEvent passed;
  };

  PinnedMemory pieces_;
  std::array<Slot, 2> slots_;
  size_t turn_ = 0;
};

}  // namespace conclave::inline v0
