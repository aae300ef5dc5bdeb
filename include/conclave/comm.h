// The Communicator seam: how ranks exchange rows and sums. Every wait has a deadline; a lost or
// late peer is a CommError naming peer and phase, never a hang.
#pragma once

#include "conclave/dtype.h"
#include "conclave/error.h"
#include "conclave/stream.h"
#include "conclave/tensor.h"
#include "conclave/version.h"

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

// Bytes that an operation reads, and the memory they lie in: spans and vectors of bytes convert.
struct ConstByteView {
  ConstByteView() = default;
  template <class Bytes>
    requires std::convertible_to<const Bytes&, std::span<const std::byte>>
  ConstByteView(const Bytes& bytes, MemoryKind kind = MemoryKind::kHost)
      : span(bytes), memory(kind) {}

  const std::byte* data() const noexcept { return span.data(); }
  int64_t size() const noexcept { return static_cast<int64_t>(span.size()); }

  std::span<const std::byte> span;
  MemoryKind memory = MemoryKind::kHost;
};
// Bytes that an operation writes.
struct ByteView {
  ByteView() = default;
  template <class Bytes>
    requires std::convertible_to<Bytes&&, std::span<std::byte>>
  ByteView(Bytes&& bytes, MemoryKind kind = MemoryKind::kHost) : span(bytes), memory(kind) {}

  std::byte* data() const noexcept { return span.data(); }
  int64_t size() const noexcept { return static_cast<int64_t>(span.size()); }

  std::span<std::byte> span;
  MemoryKind memory = MemoryKind::kHost;
};

// Byte counts and offsets per peer, each of length size(), in host memory.
struct AllToAllV {
  const std::byte* send = nullptr;
  std::span<const int64_t> send_bytes;
  std::span<const int64_t> send_offsets;
  std::byte* recv = nullptr;
  std::span<const int64_t> recv_bytes;
  std::span<const int64_t> recv_offsets;
  MemoryKind memory = MemoryKind::kHost;  // where send and recv lie
};

enum class ReduceOp : uint8_t { kSum, kMax };

enum class CommKind : uint8_t {
  kAllToAllV,
  kAllGather,
  kAllReduce,
  kReduceScatter,
  kBarrier,
  kSend,
  kRecv,
};
// "all_to_all_v"; "unknown" for a value outside the list.
CONCLAVE_API std::string_view to_string(CommKind kind) noexcept;

// One operation as values: what Communicator::begin checks and a transport then starts.
struct CommOperation {
  CommKind kind = CommKind::kBarrier;
  ConstByteView send = {};
  ByteView recv = {};
  AllToAllV exchange = {};           // for kAllToAllV, instead of send and recv
  DType dtype = DType::kU8;          // for reductions
  ReduceOp reduce = ReduceOp::kSum;  // likewise
  int32_t peer = -1;                 // for kSend and kRecv
  Stream stream = {};                // null: the operation is not ordered by a device
  // Also advances between begin and wait, where supports(kOverlap): if need be a thread of the
  // communicator moves its bytes meanwhile. Without it a transport may leave that to calls.
  bool in_background = false;
};

// An operation under way. Buffers, counts and offsets given to begin must live until wait or
// wait_on returns or throws; after wait_on, until the stream has passed.
struct CommHandle {
  uint64_t sequence = 0;
};

// A communicator may be able to do these things; supports() says which.
enum class CommFeature : uint8_t {
  kHostMemory,
  kDeviceMemory,
  kStreamOrder,  // begin takes a stream, and wait_on makes a stream follow an operation
  kOverlap,      // operations in_background advance while the ranks do other work
  kPeerMemory,   // open_window lends memory that work on a device reads and writes in place
  kShrink,       // after a failure, survivors() makes a communicator of the ranks that are left
};

// A block of memory of equal size on each rank. Every rank's blocks are addressable here: device
// work stores rows where they are needed, and the communicator only brings addresses. Destroy it on
// every rank, when no work of any rank uses it any more, before its communicator.
class CONCLAVE_API PeerWindow {
 public:
  virtual ~PeerWindow() = default;
  virtual size_t bytes() const noexcept = 0;  // in each block
  // The block of `rank`, 0 <= rank < size(), as work of this rank addresses it.
  virtual std::byte* block(int32_t rank) const noexcept = 0;
};

class Communicator;

// The communicator of the ranks that are left, and who they were: old_ranks[r] is the rank in the
// communicator that failed of rank r here. Old ranks ascend.
struct Survivors {
  std::unique_ptr<Communicator> communicator;
  std::vector<int32_t> old_ranks;
};

// Collectives: all ranks call the same ones in the same order. At most one thread per rank.
// An application's own communicator implements the virtual functions; those that are not pure
// belong to features that it may lack.
class CONCLAVE_API Communicator {
 public:
  virtual ~Communicator() = default;

  virtual std::string_view name() const noexcept = 0;
  virtual int32_t rank() const noexcept = 0;
  virtual int32_t size() const noexcept = 0;
  virtual std::chrono::nanoseconds timeout() const noexcept = 0;

  // Yes, or the reason why not. By default yes to kHostMemory only.
  virtual Support supports(CommFeature feature) const;
  // By default yes for kF32, kF64, kI32 and kI64, which every communicator adds up in rank order.
  virtual Support supports_reduction(DType dtype, ReduceOp op) const;

  // Checks the operation and starts it. Returns at once; may be called while others are under way.
  // With a stream, the operation follows the work enqueued there so far, and runs beside what is
  // enqueued later. Without one, memory of a device must be ready. Throws Error: kShape, kDType,
  // kNullPointer, kOverlap, kInvalidArgument; kUnsupported with the reason of supports().
  CommHandle begin(const CommOperation& operation);

  CommHandle begin_all_to_all_v(const AllToAllV& exchange, Stream stream = {});
  // recv.size() == send.size() * size(); block r comes from rank r.
  CommHandle begin_all_gather(ConstByteView send, ByteView recv, Stream stream = {});
  // Elementwise over ranks, in rank order (deterministic). send.size() == recv.size().
  CommHandle begin_all_reduce(ConstByteView send, ByteView recv, DType dtype, ReduceOp op,
                              Stream stream = {});
  // Block r of the reduced vector goes to rank r; send.size() == recv.size() * size().
  CommHandle begin_reduce_scatter(ConstByteView send, ByteView recv, DType dtype, ReduceOp op,
                                  Stream stream = {});
  CommHandle begin_send(int32_t peer, ConstByteView data, Stream stream = {});
  CommHandle begin_recv(int32_t peer, ByteView data, Stream stream = {});
  CommHandle begin_barrier(Stream stream = {});

  // Returns when the operation is complete on this rank. Throws CommError: kCommTimeout after
  // `deadline`, kCommPeerLost, kCommMismatch where ranks disagree on sizes or operations,
  // kCommAborted. `phase` names the step in the error. After an error the communicator is unusable.
  virtual void wait(CommHandle handle, std::chrono::nanoseconds deadline,
                    std::string_view phase) = 0;
  // True if the operation is complete: its wait will return at once, and is still to be called.
  // Never blocks; throws as wait does, but for kCommTimeout.
  virtual bool test(CommHandle handle, std::string_view phase) = 0;

  // For operations with a stream. Makes what `stream` gets from now on follow the operation; the
  // host does not wait, and the handle is done with. If the operation is not complete `deadline`
  // after its turn came, its work on the device ends and later calls throw the CommError.
  // By default throws Error(kUnsupported), as supports(kStreamOrder) says.
  virtual void wait_on(Stream stream, CommHandle handle, std::chrono::nanoseconds deadline,
                       std::string_view phase);
  // Throws the CommError that made this communicator unusable, such as that of an operation after
  // wait_on. Waits for nothing. By default it knows of none.
  virtual void check(std::string_view phase);

  // Collective: a block of `bytes` bytes of `memory` on each rank. By default throws
  // Error(kUnsupported), as supports(kPeerMemory) says.
  virtual std::unique_ptr<PeerWindow> open_window(size_t bytes, MemoryKind memory,
                                                  std::chrono::nanoseconds deadline,
                                                  std::string_view phase);

  // Makes every present and later wait of every rank fail with kCommAborted, but for operations
  // that are complete. From any thread. A wait that fails so has ended all that its rank had under
  // way: no peer touches its buffers any more.
  virtual void abort(std::string_view reason) noexcept = 0;

  // One roll call, of which survivors() may need several. Whoever dies meanwhile, each rank has the
  // same answer, or CommError(kCommExcluded) if it is not among those that go on. By default throws
  // Error(kUnsupported), as supports(kShrink) says.
  virtual Survivors shrink(std::chrono::nanoseconds deadline, std::string_view phase);

  // begin + wait with timeout().
  void all_to_all_v(const AllToAllV& exchange, std::string_view phase);
  void all_gather(ConstByteView send, ByteView recv, std::string_view phase);
  void all_reduce(ConstByteView send, ByteView recv, DType dtype, ReduceOp op,
                  std::string_view phase);
  void reduce_scatter(ConstByteView send, ByteView recv, DType dtype, ReduceOp op,
                      std::string_view phase);
  void send(int32_t peer, ConstByteView data, std::string_view phase);
  void recv(int32_t peer, ByteView data, std::string_view phase);
  void barrier(std::string_view phase);

 protected:
  // Starts an operation that begin has checked: sizes, types, peer, and that this communicator
  // supports its memory and stream. On a communicator that has failed it starts nothing, and the
  // handle's wait throws.
  virtual CommHandle start(const CommOperation& operation) = 0;
};

struct SurvivorOptions {
  // Time for the other ranks to come; zero: the communicator's timeout(). Make it longer than ranks
  // compute between two operations, or one that has not met the failure yet is left out.
  std::chrono::nanoseconds deadline = {};
};
// Goes on after a failure. Collective over the ranks of `failed` that are left: each calls it once,
// in the handler of its CommError. They agree on who is left, in a roll call that ends when every
// rank has come or is known to have ended (its process is gone, its communicator destroyed), at the
// latest at the deadline: who has not come by then, be it late, stopped or dead, is left out. Ranks
// keep their order. On a communicator that has not failed it makes the others' operations fail with
// kCommAborted first, so that they come as well. `failed` stays unusable; destroy it when it suits.
//
// Throws CommError: kCommExcluded on a rank that came after the others had gone on without it;
// kCommPeerLost, kCommTimeout where ranks are lost faster than the rest can agree, or a host falls
// silent. Takes at most twice the deadline and 2 s, over NCCL thrice and 7 s, and again for each
// rank lost meanwhile. Error: kUnsupported as supports(kShrink) says; kState after an earlier call.
CONCLAVE_API Survivors survivors(Communicator& failed, const SurvivorOptions& options = {});

// Says how a rank in a process of its own joins its group.
struct ConnectOptions {
  // -1 and 0: what the transport's launcher says, or a group of one if there is none.
  int32_t rank = -1;
  int32_t size = 0;
  // Names the place where the ranks meet, in the transport's own words (docs/parallel.md); empty if
  // its launcher knows.
  std::string meeting_point = {};
  // The same ranks, connected before: over it they tell each other what they need in order to meet.
  // Null where meeting_point is enough.
  Communicator* bootstrap = nullptr;
  // The same over whatever else the ranks share, such as a store of keys: is given this rank's text
  // (some hundred letters) and returns those of all ranks, in rank order. Called several times, by
  // every rank as often. It returns within `timeout` or throws, and connect throws that on.
  std::function<std::vector<std::string>(const std::string& mine)> exchange = {};
  // Not negative: splits the launcher's ranks. Those that give the same number are a group of their
  // own, in the launcher's order; all of them call, also those of other groups.
  int32_t group = -1;
  // The device whose memory it carries, as in ContextOptions; empty: "cpu".
  std::string device = {};
  std::chrono::nanoseconds timeout = std::chrono::seconds(30);  // for meeting, and of each wait
};
// Collective. `transport` is a name of transports(). Throws Error: kUnknownName; kInvalidArgument;
// kUnsupported with the reason; CommError if a rank does not come.
CONCLAVE_API std::unique_ptr<Communicator> connect(std::string_view transport,
                                                   const ConnectOptions& options = {});

struct TransportInfo {
  std::string name;  // "local"
  bool usable = false;
  std::string reason;  // why it is not usable, or what its ranks are
  // Variables of the environment: where one is set, a launcher has started this process as a rank.
  std::vector<std::string> launch_variables;
  // Its ranks meet by ConnectOptions::exchange, so that whoever starts processes may start them.
  bool meets_by_exchange = false;
  // The kind of the device whose memory it carries, of which each rank has one of its own: "cuda".
  // Empty: that of the host.
  std::string device_kind;
};
CONCLAVE_API std::vector<TransportInfo> transports();

// The words of a command that starts `ranks` ranks on this machine, to go before those of the
// program that connects: "mpiexec", "-n", "4". Empty where ranks are threads. A rank that dies
// leaves the others running, so that they can say so; the command's own exit status may be 0 then.
// Throws Error: kUnknownName; kInvalidArgument; kUnsupported with the reason.
CONCLAVE_API std::vector<std::string> launch_command(std::string_view transport, int32_t ranks);

// `num_ranks` communicators for threads of this process. Each keeps the shared state alive; each is
// used by one thread. Destroying one makes its peers' waits fail with kCommPeerLost.
struct LocalGroupOptions {
  int32_t num_ranks = 1;
  std::chrono::nanoseconds timeout = std::chrono::seconds(30);
};
CONCLAVE_API std::vector<std::unique_ptr<Communicator>> make_local_group(
    const LocalGroupOptions& options);

}  // namespace conclave::inline v0
