#include "comm/check_operation.h"

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

void check_disjoint(const ConstByteView& send, const ByteView& recv) {
  const std::less<const std::byte*> before;
  if (send.size() == 0 || recv.size() == 0) return;
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

void check_peer(int32_t peer, int32_t size) {
  if (peer >= 0 && peer < size) return;
  throw Error(ErrorCode::kInvalidArgument, {.what = "no rank of this number in the group",
                                            .tensor = "peer",
                                            .expected = fmt::format("between 0 and {}", size - 1),
                                            .found = std::to_string(peer)});
}

void check_reduction(const CommOperation& operation, const Communicator& communicator) {
  const DType dtype = operation.dtype;
  if (!communicator.supports_reduction(dtype, operation.reduce)) {
    throw Error(ErrorCode::kDType, {.what = "reductions do not know this type",
                                    .expected = "F32, F64, I32 or I64",
                                    .found = std::string(conclave::to_string(dtype))});
  }
  if (operation.recv.size() % byte_size(dtype) != 0) {
    throw Error(ErrorCode::kShape,
                {.what = "a reduction buffer is not a whole number of elements",
                 .tensor = "recv",
                 .expected = fmt::format("a multiple of {} bytes", byte_size(dtype)),
                 .found = fmt::format("{} bytes", operation.recv.size())});
  }
  check_disjoint(operation.send, operation.recv);
}

void need(const Communicator& communicator, CommFeature feature) {
  const Support support = communicator.supports(feature);
  if (support) return;
  throw Error(ErrorCode::kUnsupported,
              {.what = "this communicator cannot carry the operation", .found = support.reason()});
}

}  // namespace

void check_arguments(const CommOperation& operation, const Communicator& communicator) {
  const int32_t ranks = communicator.size();
  switch (operation.kind) {
    case CommKind::kAllToAllV: {
      const AllToAllV& exchange = operation.exchange;
      const auto count = static_cast<size_t>(ranks);
      check_counts("send", exchange.send, exchange.send_bytes, exchange.send_offsets, count);
      check_counts("recv", exchange.recv, exchange.recv_bytes, exchange.recv_offsets, count);
      return;
    }
    case CommKind::kAllGather:
      check_size("recv", operation.send.size() * ranks, operation.recv.size());
      check_disjoint(operation.send, operation.recv);
      return;
    case CommKind::kAllReduce:
      check_size("recv", operation.send.size(), operation.recv.size());
      check_reduction(operation, communicator);
      return;
    case CommKind::kReduceScatter:
      check_size("send", operation.recv.size() * ranks, operation.send.size());
      check_reduction(operation, communicator);
      return;
    case CommKind::kSend:
    case CommKind::kRecv:
      check_peer(operation.peer, ranks);
      return;
    case CommKind::kBarrier:
      return;
  }
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "no communication operation of this value",
               .tensor = "kind",
               .found = std::to_string(static_cast<int>(operation.kind))});
}

void check_features(const CommOperation& operation, const Communicator& communicator) {
  const auto carries = [&](MemoryKind memory) {
    need(communicator,
         memory == MemoryKind::kHost ? CommFeature::kHostMemory : CommFeature::kDeviceMemory);
  };
  if (operation.stream.handle != nullptr) need(communicator, CommFeature::kStreamOrder);
  if (operation.kind == CommKind::kAllToAllV) return carries(operation.exchange.memory);
  if (operation.send.size() > 0) carries(operation.send.memory);
  if (operation.recv.size() > 0) carries(operation.recv.memory);
}

}  // namespace conclave::inline v0::comm
