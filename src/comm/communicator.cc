#include "comm/check_operation.h"
#include "comm/reduce.h"

#include "conclave/comm.h"

#include <array>
#include <string>

namespace conclave::inline v0 {
namespace {

struct KindName {
  CommKind kind;
  std::string_view name;
};
constexpr std::array kKindNames = {
    KindName{CommKind::kAllToAllV, "all_to_all_v"},
    KindName{CommKind::kAllGather, "all_gather"},
    KindName{CommKind::kAllReduce, "all_reduce"},
    KindName{CommKind::kReduceScatter, "reduce_scatter"},
    KindName{CommKind::kBarrier, "barrier"},
    KindName{CommKind::kSend, "send"},
    KindName{CommKind::kRecv, "recv"},
};

std::string_view ability(CommFeature feature) {
  switch (feature) {
    case CommFeature::kHostMemory:
      return "carry host memory";
    case CommFeature::kDeviceMemory:
      return "carry memory of a device";
    case CommFeature::kStreamOrder:
      return "order its operations by a stream";
    case CommFeature::kOverlap:
      return "move data while the ranks do other work";
    case CommFeature::kPeerMemory:
      return "lend memory of its peers";
    case CommFeature::kShrink:
      return "find out which ranks are left after a failure";
  }
  return "do this";
}

[[noreturn]] void refuse(const Communicator& communicator, CommFeature feature, const char* call) {
  throw Error(ErrorCode::kUnsupported, {.what = std::string("this communicator has no ") + call,
                                        .found = communicator.supports(feature).reason()});
}

}  // namespace

std::string_view to_string(CommKind kind) noexcept {
  for (const KindName& entry : kKindNames) {
    if (entry.kind == kind) return entry.name;
  }
  return "unknown";
}

Support Communicator::supports(CommFeature feature) const {
  if (feature == CommFeature::kHostMemory) return Support::yes();
  return Support::no("the communicator " + std::string(name()) + " cannot " +
                     std::string(ability(feature)));
}

Support Communicator::supports_reduction(DType dtype, ReduceOp) const {
  if (comm::is_reducible(dtype)) return Support::yes();
  return Support::no("reductions take F32, F64, I32 or I64, not " + std::string(to_string(dtype)));
}

CommHandle Communicator::begin(const CommOperation& operation) {
  comm::check_arguments(operation, *this);
  comm::check_features(operation, *this);
  return start(operation);
}

CommHandle Communicator::begin_all_to_all_v(const AllToAllV& exchange, Stream stream) {
  return begin({.kind = CommKind::kAllToAllV, .exchange = exchange, .stream = stream});
}

CommHandle Communicator::begin_all_gather(ConstByteView send, ByteView recv, Stream stream) {
  return begin({.kind = CommKind::kAllGather, .send = send, .recv = recv, .stream = stream});
}

CommHandle Communicator::begin_all_reduce(ConstByteView send, ByteView recv, DType dtype,
                                          ReduceOp op, Stream stream) {
  return begin({.kind = CommKind::kAllReduce,
                .send = send,
                .recv = recv,
                .dtype = dtype,
                .reduce = op,
                .stream = stream});
}

CommHandle Communicator::begin_reduce_scatter(ConstByteView send, ByteView recv, DType dtype,
                                              ReduceOp op, Stream stream) {
  return begin({.kind = CommKind::kReduceScatter,
                .send = send,
                .recv = recv,
                .dtype = dtype,
                .reduce = op,
                .stream = stream});
}

CommHandle Communicator::begin_send(int32_t peer, ConstByteView data, Stream stream) {
  return begin({.kind = CommKind::kSend, .send = data, .peer = peer, .stream = stream});
}

CommHandle Communicator::begin_recv(int32_t peer, ByteView data, Stream stream) {
  return begin({.kind = CommKind::kRecv, .recv = data, .peer = peer, .stream = stream});
}

CommHandle Communicator::begin_barrier(Stream stream) {
  return begin({.kind = CommKind::kBarrier, .stream = stream});
}

void Communicator::wait_on(Stream, CommHandle, std::chrono::nanoseconds, std::string_view) {
  refuse(*this, CommFeature::kStreamOrder, "wait_on");
}

void Communicator::check(std::string_view) {}

std::unique_ptr<PeerWindow> Communicator::open_window(size_t, MemoryKind, std::chrono::nanoseconds,
                                                      std::string_view) {
  refuse(*this, CommFeature::kPeerMemory, "open_window");
}

Survivors Communicator::shrink(std::chrono::nanoseconds, std::string_view) {
  refuse(*this, CommFeature::kShrink, "shrink");
}

void Communicator::all_to_all_v(const AllToAllV& exchange, std::string_view phase) {
  wait(begin_all_to_all_v(exchange), timeout(), phase);
}

void Communicator::all_gather(ConstByteView send, ByteView recv, std::string_view phase) {
  wait(begin_all_gather(send, recv), timeout(), phase);
}

void Communicator::all_reduce(ConstByteView send, ByteView recv, DType dtype, ReduceOp op,
                              std::string_view phase) {
  wait(begin_all_reduce(send, recv, dtype, op), timeout(), phase);
}

void Communicator::reduce_scatter(ConstByteView send, ByteView recv, DType dtype, ReduceOp op,
                                  std::string_view phase) {
  wait(begin_reduce_scatter(send, recv, dtype, op), timeout(), phase);
}

void Communicator::send(int32_t peer, ConstByteView data, std::string_view phase) {
  wait(begin_send(peer, data), timeout(), phase);
}

void Communicator::recv(int32_t peer, ByteView data, std::string_view phase) {
  wait(begin_recv(peer, data), timeout(), phase);
}

void Communicator::barrier(std::string_view phase) { wait(begin_barrier(), timeout(), phase); }

}  // namespace conclave::inline v0
