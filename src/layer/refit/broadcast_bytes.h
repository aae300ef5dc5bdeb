// Bytes from one rank to all others, by operations that every communicator has: the root gives each
// rank a part, and ranks give each other theirs, so that no rank sends everything to all.
#pragma once

#include "conclave/comm.h"
#include "conclave/context.h"
#include "conclave/device_queue.h"
#include "conclave/tensor.h"

#include <cstddef>
#include <exception>
#include <memory>

namespace conclave::inline v0 {

// Memory of either kind. A device's needs a queue.
class BroadcastBuffer {
 public:
  BroadcastBuffer() = default;
  BroadcastBuffer(size_t bytes, MemoryKind kind, const DeviceQueue* queue);

  std::byte* data() noexcept;
  const std::byte* data() const noexcept { return const_cast<BroadcastBuffer*>(this)->data(); }
  size_t bytes() const noexcept { return bytes_; }
  MemoryKind kind() const noexcept { return kind_; }

 private:
  size_t bytes_ = 0;
  MemoryKind kind_ = MemoryKind::kHost;
  Tensor host_;
  DeviceTensor device_;
};

class BroadcastBytes {
 public:
  BroadcastBytes(Communicator& communicator, int32_t root)
      : communicator_(communicator), root_(root) {}

  bool is_root() const { return communicator_.rank() == root_; }
  // A buffer for `bytes` must have as many, on every rank.
  size_t padded(size_t bytes) const;
  // Collective. `all` has padded(bytes) and is the root's to be sent, the others' to be filled; the
  // root's keeps its contents. `part` and, on the root, `echo` are as large, of the same memory.
  void run(size_t bytes, std::byte* all, BroadcastBuffer& part, BroadcastBuffer& echo);
  // Collective: throws `mine` on this rank, and CommError(kCommMismatch) where another has one.
  void agree(std::exception_ptr mine);

 private:
  Communicator& communicator_;
  int32_t root_;
};

}  // namespace conclave::inline v0
