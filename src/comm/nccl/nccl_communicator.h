// A rank with a GPU: device memory goes by NCCL on a stream of its own, host memory by messages,
// over which ranks that are left after a failure also find each other (shrink.cc).
#pragma once

#include "comm/nccl/device_exchange.h"
#include "comm/nccl/nccl_group.h"
#include "comm/nccl/nccl_watch.h"
#include "comm/nccl/peer_windows.h"
#include "comm/one_launch.h"
#include "cuda/stream.h"

#include "conclave/comm.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::comm {

class NcclCommunicator final : public Communicator, public OneLaunch {
 public:
  struct Parts {
    std::unique_ptr<NcclGroup> group;
    std::unique_ptr<Communicator> host;    // for host memory
    std::unique_ptr<Communicator> peers;   // for the watch
    std::unique_ptr<PeerWindows> windows;  // null where NCCL carries everything
    std::string no_windows;                // then why
    std::chrono::nanoseconds timeout{};
  };
  // With the group's device current.
  explicit NcclCommunicator(Parts parts);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  ~NcclCommunicator() override;

  // Collective: each rank reaches every other, so that no later operation has to connect.
  void meet();

  std::string_view name() const noexcept override { return "nccl"; }
  int32_t rank() const noexcept override { return host_->rank(); }
  int32_t size() const noexcept override { return host_->size(); }
  std::chrono::nanoseconds timeout() const noexcept override { return timeout_; }
  Support supports(CommFeature feature) const override;
  const Support& has_one_launch() const noexcept override { return one_launch_; }
  CommHandle begin_sum_of_parts(const PartsOfRanks& parts, Stream stream) override;
  int64_t window_bytes() const noexcept override;
  CommHandle begin_kernel(const WindowMessages& messages, const WindowKernel& kernel,
                          Stream stream) override;

  void wait(CommHandle handle, std::chrono::nanoseconds deadline, std::string_view phase) override;
  bool test(CommHandle handle, std::string_view phase) override;
  void wait_on(Stream stream, CommHandle handle, std::chrono::nanoseconds deadline,
               std::string_view phase) override;
  void check(std::string_view phase) override { watch_->check(phase); }
  void abort(std::string_view reason) noexcept override;
  Survivors shrink(std::chrono::nanoseconds deadline, std::string_view phase) override;

 protected:
  CommHandle start(const CommOperation& operation) override;

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;

  enum class Standing : uint8_t { kFree, kPending, kBegun, kFollowed };
  // A begun operation. One that a stream follows keeps its cell until the device has ended it.
  struct Slot {
    Standing standing = Standing::kFree;
    uint64_t sequence = 0;
    CommOperation operation;
    int32_t cell = 0;
    uint32_t number = 0;      // among the cell's operations
    cuda::OwnedEvent before;  // what a pending message follows
    cuda::OwnedEvent done;
    bool is_on_stream = false;  // the caller's runs it
  };
  // Each capture of a stream's work has a number.
  using Capture = uint64_t;
  static constexpr Capture kNoCapture = 0;

  // Ends what is under way, and lets the others know.
  void call_for_survivors();
  CommHandle start_on_host(const CommOperation& operation);
  CommHandle start_on_device(const CommOperation& operation);
  // A kernel, or null, is what carries out a collective.
  CommHandle begin_on_device(const CommOperation& operation, const WindowKernel* kernel);
  void check_memory(const CommOperation& operation) const;
  void check_own_bytes(const CommOperation& operation);
  Slot& take_slot(Lock& lock);
  Slot& slot_of(CommHandle handle, std::string_view phase);
  bool is_over(const Slot& slot) const;
  Capture capture_of(Stream stream) const;
  // Whether the stream waits for every operation before that of `sequence`.
  bool has_followed_all(Stream stream, Capture capture, uint64_t sequence) const;
  void enqueue(Slot& slot, const WindowKernel* kernel);
  void enqueue_on(Stream stream, Capture capture, Slot& slot, const WindowKernel& kernel,
                  const MarkPlace& place);
  // Messages go together when one of them is waited for, or a collective follows them.
  void enqueue_messages();
  MarkPlace next_place(Slot& slot, bool captured);
  template <class Body>
  void guarded(const Body& body);
  template <class Body>
  auto on_host(std::string_view phase, const Body& body);

  std::unique_ptr<NcclGroup> group_;
  std::unique_ptr<Communicator> host_;
  std::chrono::nanoseconds timeout_;
  Marks* marks_ = nullptr;         // in host memory
  Marks* device_marks_ = nullptr;  // the same, as the device addresses it
  std::unique_ptr<PeerWindows> windows_;
  Support one_launch_;
  DeviceExchange exchange_;
  cuda::OwnedStream stream_;

  std::mutex mutex_;  // guards the slots
  std::vector<Slot> slots_;
  std::vector<uint32_t> numbers_;  // begun in each cell
  std::vector<CommOperation> messages_;
  uint64_t next_sequence_ = 1;
  struct Followed {
    void* stream = nullptr;
    Capture capture = kNoCapture;
    uint64_t sequence = 0;
  } followed_;  // the last operation that a stream was made to wait for
  struct Left {
    Capture capture = kNoCapture;
    cudaEvent_t event = nullptr;
  } left_;  // an operation of a capture that stream_ is not behind
  bool has_gone_on_ = false;
  std::unique_ptr<NcclWatch> watch_;  // last: its thread uses others
};

}  // namespace conclave::inline v0::comm
