#include "layer/refit/broadcast_bytes.h"

#include "core/checked.h"

#include "conclave/error.h"

#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0 {
namespace {

constexpr const char* kPhase = "broadcast of weights";
constexpr int64_t kPartAlignment = 256;

}  // namespace

BroadcastBuffer::BroadcastBuffer(size_t bytes, MemoryKind kind, const DeviceQueue* queue)
    : bytes_(bytes), kind_(kind) {
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

size_t BroadcastBytes::padded(size_t bytes) const {
  const int64_t ranks = communicator_.size();
  return static_cast<size_t>(
      ranks * round_up(ceil_div(static_cast<int64_t>(bytes), ranks), kPartAlignment));
}

void BroadcastBytes::run(size_t bytes, std::byte* all, BroadcastBuffer& part,
                         BroadcastBuffer& echo) {
  const auto ranks = static_cast<size_t>(communicator_.size());
  if (bytes == 0 || ranks == 1) return;
  const size_t part_bytes = padded(bytes) / ranks;
  const auto signed_part = static_cast<int64_t>(part_bytes);
  std::vector<int64_t> send_bytes(ranks, 0);
  std::vector<int64_t> send_offsets(ranks, 0);
  std::vector<int64_t> recv_bytes(ranks, 0);
  const std::vector<int64_t> recv_offsets(ranks, 0);
  recv_bytes[static_cast<size_t>(root_)] = signed_part;
  for (size_t rank = 0; rank < ranks && is_root(); ++rank) {
    send_bytes[rank] = signed_part;
    send_offsets[rank] = static_cast<int64_t>(rank) * signed_part;
  }
  communicator_.all_to_all_v({.send = is_root() ? all : nullptr,
                              .send_bytes = send_bytes,
                              .send_offsets = send_offsets,
                              .recv = part.data(),
                              .recv_bytes = recv_bytes,
                              .recv_offsets = recv_offsets,
                              .memory = part.kind()},
                             kPhase);
  std::byte* const to = is_root() ? echo.data() : all;
  communicator_.all_gather({std::span<const std::byte>(part.data(), part_bytes), part.kind()},
                           {std::span<std::byte>(to, part_bytes * ranks), part.kind()}, kPhase);
}

void BroadcastBytes::agree(std::exception_ptr mine) {
  const int64_t failed = mine ? 1 : 0;
  std::vector<int64_t> all(static_cast<size_t>(communicator_.size()));
  communicator_.all_gather(std::as_bytes(std::span(&failed, 1)),
                           std::as_writable_bytes(std::span(all)), kPhase);
  if (mine) std::rethrow_exception(mine);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == 0) continue;
    throw CommError(ErrorCode::kCommMismatch, static_cast<int32_t>(rank), kPhase,
                    "rank " + std::to_string(rank) + " ended a broadcast of weights");
  }
}

}  // namespace conclave::inline v0
