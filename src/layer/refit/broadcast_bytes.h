// Bytes from one rank to all others, by operations that every communicator has: the root gives each
// other rank a part, and those give each other theirs, so that no rank sends everything to all.
#pragma once

#include "conclave/comm.h"
#include "conclave/context.h"
#include "conclave/device_queue.h"
#include "conclave/stream.h"
#include "conclave/tensor.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

namespace conclave::inline v0 {

inline constexpr const char* kBroadcastPhase = "broadcast of weights";

// Memory of either kind. A device's needs a queue.
class BroadcastBuffer {
 public:
  BroadcastBuffer() = default;
  BroadcastBuffer(size_t bytes, MemoryKind kind, const DeviceQueue* queue);

  std::byte* data() noexcept;
  const std::byte* data() const noexcept { return const_cast<BroadcastBuffer*>(this)->data(); }

 private:
  MemoryKind kind_ = MemoryKind::kHost;
  Tensor host_;
  DeviceTensor device_;
};

class BroadcastBytes {
 public:
  BroadcastBytes(Communicator& communicator, int32_t root)
      : communicator_(communicator), root_(root) {}
  BroadcastBytes(const BroadcastBytes&) = delete;
  BroadcastBytes& operator=(const BroadcastBytes&) = delete;
  // Waits for what is under way, so that nobody touches its memory any more.
  ~BroadcastBytes();

  bool is_root() const { return communicator_.rank() == root_; }
  // Collective: the root sends `bytes` bytes of its `all`, the others receive as many in theirs.
  // Host memory is there at once. That of a device follows what `stream` holds and may be on its
  // way until await, where it must stay.
  void send(size_t bytes, std::byte* all, MemoryKind memory, Stream stream);
  // Returns when at most `under_way` of those that were begun are.
  void await(size_t under_way);

 private:
  // Counts outlive the operation that reads them.
  struct Step {
    explicit Step(size_t ranks)
        : send_bytes(ranks, 0),
          send_offsets(ranks, 0),
          recv_bytes(ranks, 0),
          recv_offsets(ranks, 0) {}
    std::vector<int64_t> send_bytes;
    std::vector<int64_t> send_offsets;
    std::vector<int64_t> recv_bytes;
    std::vector<int64_t> recv_offsets;
    std::optional<CommHandle> handle = {};  // while somebody has to wait for it
  };
  struct Sending {
    Step scatter;
    Step gather;
  };

  void begin(Step& step, std::byte* all, MemoryKind memory, Stream stream);
  void end(Step& step);

  Communicator& communicator_;
  int32_t root_;
  std::deque<Sending> under_way_;
};

}  // namespace conclave::inline v0
