// The begin half of LocalCommunicator: checks the arguments, then makes the operation visible.
#include "comm/local/local_communicator.h"
#include "comm/reduce.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string>

namespace conclave::inline v0::comm {
namespace {

void check_size(std::string_view name, int64_t expected, int64_t found) {
  if (expected == found) return;
  throw Error(ErrorCode::kShape, {.what = "a communication buffer has the wrong size",
                                  .tensor = std::string(name),
                                  .expected = fmt::format("{} bytes", expected),
                                  .found = fmt::format("{} bytes", found)});
}

void check_pointer(std::string_view name, const void* data, int64_t bytes) {
  if (data != nullptr || bytes == 0) return;
  throw Error(ErrorCode::kNullPointer,
              {.what = "a communication buffer is null", .tensor = std::string(name)});
}

void check_disjoint(std::span<const std::byte> send, std::span<std::byte> recv) {
  const std::less<const std::byte*> before;
  if (send.empty() || recv.empty()) return;
  if (!before(recv.data(), send.data() + send.size()) ||
      !before(send.data(), recv.data() + recv.size())) {
    return;
  }
  throw Error(
      ErrorCode::kOverlap,
      {.what = "send and recv share memory that peers read while it is written", .tensor = "recv"});
}

// Checks one direction of an AllToAllV.
void check_counts(std::string_view name, const void* data, std::span<const int64_t> bytes,
                  std::span<const int64_t> offsets, size_t ranks) {
  if (bytes.size() != ranks || offsets.size() != ranks) {
    throw Error(ErrorCode::kShape,
                {.what = "all_to_all_v needs one count and one offset per rank",
                 .tensor = std::string(name),
                 .expected = std::to_string(ranks),
                 .found = fmt::format("{} counts, {} offsets", bytes.size(), offsets.size())});
  }
  int64_t largest = 0;
  for (size_t peer = 0; peer < ranks; ++peer) {
    if (bytes[peer] < 0 || offsets[peer] < 0) {
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = fmt::format("all_to_all_v: negative count or offset for rank {}", peer),
                   .tensor = std::string(name),
                   .found = fmt::format("{} bytes at {}", bytes[peer], offsets[peer])});
    }
    largest = std::max(largest, bytes[peer]);
  }
  check_pointer(name, data, largest);
}

int64_t bytes_of(std::span<const std::byte> buffer) { return static_cast<int64_t>(buffer.size()); }

}  // namespace

void LocalCommunicator::check_peer(int32_t peer) const {
  if (peer >= 0 && peer < size()) return;
  throw Error(ErrorCode::kInvalidArgument, {.what = "no rank of this number in the group",
                                            .tensor = "peer",
                                            .expected = fmt::format("between 0 and {}", size() - 1),
                                            .found = std::to_string(peer)});
}

void LocalCommunicator::check_reduction(std::span<const std::byte> send, std::span<std::byte> recv,
                                        DType dtype) const {
  if (!is_reducible(dtype)) {
    throw Error(ErrorCode::kDType, {.what = "reductions do not know this type",
                                    .expected = "F32, F64, I32 or I64",
                                    .found = std::string(conclave::to_string(dtype))});
  }
  if (bytes_of(recv) % byte_size(dtype) != 0) {
    throw Error(ErrorCode::kShape,
                {.what = "a reduction buffer is not a whole number of elements",
                 .tensor = "recv",
                 .expected = fmt::format("a multiple of {} bytes", byte_size(dtype)),
                 .found = fmt::format("{} bytes", recv.size())});
  }
  check_disjoint(send, recv);
}

CommHandle LocalCommunicator::begin_all_to_all_v(const AllToAllV& exchange) {
  const size_t ranks = group_->ranks.size();
  check_counts("send", exchange.send, exchange.send_bytes, exchange.send_offsets, ranks);
  check_counts("recv", exchange.recv, exchange.recv_bytes, exchange.recv_offsets, ranks);
  const Lock lock(group_->mutex);
  Operation& operation = post(OperationKind::kAllToAllV, -1);
  operation.send = exchange.send;
  operation.recv = exchange.recv;
  operation.send_counts.assign(exchange.send_bytes.begin(), exchange.send_bytes.end());
  operation.send_offsets.assign(exchange.send_offsets.begin(), exchange.send_offsets.end());
  operation.recv_counts.assign(exchange.recv_bytes.begin(), exchange.recv_bytes.end());
  operation.recv_offsets.assign(exchange.recv_offsets.begin(), exchange.recv_offsets.end());
  return publish(operation);
}

CommHandle LocalCommunicator::begin_all_gather(std::span<const std::byte> send,
                                               std::span<std::byte> recv) {
  check_size("recv", bytes_of(send) * size(), bytes_of(recv));
  check_disjoint(send, recv);
  const Lock lock(group_->mutex);
  Operation& operation = post(OperationKind::kAllGather, -1);
  operation.send = send.data();
  operation.send_bytes = bytes_of(send);
  operation.recv = recv.data();
  operation.recv_bytes = bytes_of(recv);
  return publish(operation);
}

CommHandle LocalCommunicator::begin_all_reduce(std::span<const std::byte> send,
                                               std::span<std::byte> recv, DType dtype,
                                               ReduceOp op) {
  check_size("recv", bytes_of(send), bytes_of(recv));
  check_reduction(send, recv, dtype);
  const Lock lock(group_->mutex);
  Operation& operation = post(OperationKind::kAllReduce, -1);
  operation.send = send.data();
  operation.send_bytes = bytes_of(send);
  operation.recv = recv.data();
  operation.recv_bytes = bytes_of(recv);
  operation.dtype = dtype;
  operation.reduce = op;
  return publish(operation);
}

CommHandle LocalCommunicator::begin_reduce_scatter(std::span<const std::byte> send,
                                                   std::span<std::byte> recv, DType dtype,
                                                   ReduceOp op) {
  check_size("send", bytes_of(recv) * size(), bytes_of(send));
  check_reduction(send, recv, dtype);
  const Lock lock(group_->mutex);
  Operation& operation = post(OperationKind::kReduceScatter, -1);
  operation.send = send.data();
  operation.send_bytes = bytes_of(send);
  operation.recv = recv.data();
  operation.recv_bytes = bytes_of(recv);
  operation.dtype = dtype;
  operation.reduce = op;
  return publish(operation);
}

CommHandle LocalCommunicator::begin_send(int32_t peer, std::span<const std::byte> data) {
  check_peer(peer);
  const Lock lock(group_->mutex);
  Operation& operation = post(OperationKind::kSend, peer);
  operation.send = data.data();
  operation.send_bytes = bytes_of(data);
  return publish(operation);
}

CommHandle LocalCommunicator::begin_recv(int32_t peer, std::span<std::byte> data) {
  check_peer(peer);
  const Lock lock(group_->mutex);
  Operation& operation = post(OperationKind::kRecv, peer);
  operation.recv = data.data();
  operation.recv_bytes = bytes_of(data);
  return publish(operation);
}

CommHandle LocalCommunicator::begin_barrier() {
  const Lock lock(group_->mutex);
  return publish(post(OperationKind::kBarrier, -1));
}

Operation& LocalCommunicator::post(OperationKind kind, int32_t peer) {
  auto& operations = self().operations;
  const auto free = std::find_if(operations.begin(), operations.end(),
                                 [](const Operation& o) { return !o.in_use(); });
  if (free == operations.end()) {
    throw Error(ErrorCode::kState, {.what = "too many operations are begun and not waited for",
                                    .found = std::to_string(operations.size()),
                                    .limit = std::to_string(kMaxOperations)});
  }
  const size_t ranks = group_->ranks.size();
  free->kind = kind;
  free->peer = peer;
  free->send = nullptr;
  free->recv = nullptr;
  free->send_bytes = 0;
  free->recv_bytes = 0;
  // These grow once per entry; entries are reused lowest first, so later calls do not allocate.
  free->taken.assign(ranks, 0);
  free->acked.assign(ranks, 0);
  free->partners.assign(ranks, nullptr);
  return *free;
}

CommHandle LocalCommunicator::publish(Operation& operation) {
  if (!usable()) return {next_sequence_++};
  switch (operation.kind) {
    case OperationKind::kSend:
      operation.number = sends_[static_cast<size_t>(operation.peer)]++;
      break;
    case OperationKind::kRecv:
      operation.number = receives_[static_cast<size_t>(operation.peer)]++;
      break;
    default:
      operation.number = collectives_++;
      break;
  }
  operation.sequence = next_sequence_++;
  group_->changed.notify_all();
  return {operation.sequence};
}

}  // namespace conclave::inline v0::comm

namespace conclave::inline v0 {

std::vector<std::unique_ptr<Communicator>> make_local_group(const LocalGroupOptions& options) {
  if (options.num_ranks < 1) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "a local group needs ranks",
                                              .tensor = "num_ranks",
                                              .expected = "at least 1",
                                              .found = std::to_string(options.num_ranks)});
  }
  auto group = std::make_shared<comm::LocalGroup>();
  group->ranks.resize(static_cast<size_t>(options.num_ranks));
  std::vector<std::unique_ptr<Communicator>> communicators;
  communicators.reserve(group->ranks.size());
  for (int32_t rank = 0; rank < options.num_ranks; ++rank) {
    communicators.push_back(
        std::make_unique<comm::LocalCommunicator>(group, rank, options.timeout));
  }
  return communicators;
}

}  // namespace conclave::inline v0
