#include "layer/refit/broadcast_bytes.h"

#include "core/checked.h"

#include "conclave/error.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr int64_t kPartAlignment = 256;

// The part of `bytes` bytes that receiver number `index` of `receivers` has from the root.
struct Part {
  int64_t begin = 0;
  int64_t bytes = 0;
};
Part part_of(int64_t bytes, int64_t receivers, int64_t index) {
  const int64_t block = round_up(ceil_div(bytes, receivers), kPartAlignment);
  const int64_t begin = std::min(block * index, bytes);
  return {.begin = begin, .bytes = std::min(begin + block, bytes) - begin};
}

}  // namespace

BroadcastBuffer::BroadcastBuffer(size_t bytes, MemoryKind kind, const DeviceQueue* queue)
    : kind_(kind) {
  const Shape shape = {static_cast<int64_t>(bytes)};
  if (kind == MemoryKind::kHost) {
    host_ = Tensor(DType::kU8, shape);
  } else {
    device_ = queue->allocate(DType::kU8, shape);
  }
}

std::byte* BroadcastBuffer::data() noexcept {
  return kind_ == MemoryKind::kHost ? host_.as<std::byte>() : device_.as<std::byte>();
}

// A wait that fails has ended all that was under way.
BroadcastBytes::~BroadcastBytes() {
  try {
    await(0);
  } catch (const std::exception&) {
    return;  // whoever destroys this has an error of its own
  }
}

void BroadcastBytes::send(size_t bytes, std::byte* all, MemoryKind memory, Stream stream) {
  const auto ranks = static_cast<size_t>(communicator_.size());
  if (bytes == 0 || ranks == 1) return;
  const auto receivers = static_cast<int64_t>(ranks) - 1;
  const auto part = [&](size_t rank) {
    const auto index = static_cast<int64_t>(rank) - (rank > static_cast<size_t>(root_) ? 1 : 0);
    return part_of(static_cast<int64_t>(bytes), receivers, index);
  };
  const auto own = static_cast<size_t>(communicator_.rank());
  const auto root = static_cast<size_t>(root_);
  Sending& sending = under_way_.emplace_back(Sending{Step(ranks), Step(ranks)});
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (rank == root) continue;
    const Part theirs = part(rank);
    if (is_root()) {
      sending.scatter.send_bytes[rank] = theirs.bytes;
      sending.scatter.send_offsets[rank] = theirs.begin;
    } else if (rank == own) {
      sending.scatter.recv_bytes[root] = theirs.bytes;
      sending.scatter.recv_offsets[root] = theirs.begin;
    } else {
      sending.gather.send_bytes[rank] = part(own).bytes;
      sending.gather.send_offsets[rank] = part(own).begin;
      sending.gather.recv_bytes[rank] = theirs.bytes;
      sending.gather.recv_offsets[rank] = theirs.begin;
    }
  }
  begin(sending.scatter, all, memory, stream);
  if (receivers > 1) {
    const bool is_ordered = stream.handle != nullptr;
    // The root only comes: nothing of its own follows the parts.
    if (is_ordered && !is_root()) {
      communicator_.wait_on(stream, *sending.scatter.handle, communicator_.timeout(),
                            kBroadcastPhase);
      sending.scatter.handle.reset();
    } else if (!is_ordered) {
      end(sending.scatter);
    }
    begin(sending.gather, all, memory, stream);
  }
  if (memory == MemoryKind::kHost) await(0);
}

void BroadcastBytes::begin(Step& step, std::byte* all, MemoryKind memory, Stream stream) {
  step.handle = communicator_.begin_all_to_all_v({.send = all,
                                                  .send_bytes = step.send_bytes,
                                                  .send_offsets = step.send_offsets,
                                                  .recv = all,
                                                  .recv_bytes = step.recv_bytes,
                                                  .recv_offsets = step.recv_offsets,
                                                  .memory = memory},
                                                 stream);
}

void BroadcastBytes::end(Step& step) {
  if (!step.handle) return;
  communicator_.wait(*std::exchange(step.handle, {}), communicator_.timeout(), kBroadcastPhase);
}

void BroadcastBytes::await(size_t under_way) {
  while (under_way_.size() > under_way) {
    end(under_way_.front().scatter);
    end(under_way_.front().gather);
    under_way_.pop_front();
  }
}

}  // namespace conclave::inline v0
