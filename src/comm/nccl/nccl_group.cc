#include "comm/nccl/nccl_group.h"

#include "comm/deadline.h"
#include "cuda/check.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <cuda_runtime_api.h>
#include <mutex>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using Clock = std::chrono::steady_clock;

// For a call of NCCL that may be stuck behind a full queue of launches: the abort ends these too.
constexpr auto kPatience = 1s;
// For NCCL to free what it has, where nothing holds it up.
constexpr auto kEndTime = 5s;
constexpr auto kBetweenLooks = 10ms;

// A call returns it where CUDA has failed.
constexpr NcclResult kCudaFailed = 1;

struct Making {
  std::mutex mutex;
  bool is_made = false;  // or has failed
  bool is_abandoned = false;
  NcclResult result = kNcclInProgress;
  ncclComm* comm = nullptr;

  // Ends what has been made, and what is made later.
  void abandon(const NcclLibrary& library) {
    const std::lock_guard lock(mutex);
    is_abandoned = true;
    ncclComm* const made = std::exchange(comm, nullptr);
    if (made == nullptr) return;
    const NcclWork end([made, library] { static_cast<void>(library.comm_abort(made)); });
  }
};

}  // namespace

NcclGroup::NcclGroup(int32_t ordinal) : ordinal_(ordinal) {}

NcclGroup::NcclGroup(const NcclLibrary& library, int32_t ordinal, const Make& make,
                     std::chrono::nanoseconds timeout, const std::function<void()>& look)
    : library_(library), ordinal_(ordinal) {
  const auto making = std::make_shared<Making>();
  NcclWork work([making, make, ordinal, library] {
    ncclComm* made = nullptr;
    const NcclResult result = cudaSetDevice(ordinal) == cudaSuccess ? make(&made) : kCudaFailed;
    NcclWork::go_on();
    if (result != kNcclSuccess) made = nullptr;
    {
      const std::lock_guard lock(making->mutex);
      making->is_made = true;
      making->result = result;
      if (!making->is_abandoned) making->comm = std::exchange(made, nullptr);
    }
    if (made != nullptr) static_cast<void>(library.comm_abort(made));
  });
  const auto until = time_after(timeout);
  try {
    while (!work.wait_for(kBetweenLooks) && Clock::now() < until) look();
  } catch (...) {
    making->abandon(library_);
    throw;
  }
  const std::lock_guard lock(making->mutex);
  if (!making->is_made) {
    making->is_abandoned = true;
    throw CommError(
        ErrorCode::kCommTimeout, -1, "connect",
        fmt::format("NCCL did not connect the ranks within {} ms",
                    std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count()));
  }
  check_nccl(library_, making->result, "connecting the ranks by NCCL");
  comm_ = making->comm;
}

NcclGroup::~NcclGroup() {
  end_work();
  if (ending_ != nullptr) ending_->wait_for(kEndTime);
}

NcclResult NcclGroup::async_error() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || comm_ == nullptr) return kNcclSuccess;
  NcclResult state = kNcclSuccess;
  const NcclResult result = library_.comm_get_async_error(comm_, &state);
  return result != kNcclSuccess ? result : state;
}

void NcclGroup::end_work() noexcept {
  std::unique_lock lock(mutex_, kPatience);
  ncclComm* const comm = comm_.exchange(nullptr);
  if (comm == nullptr) return;
  ending_ = std::make_unique<NcclWork>([comm, library = library_, ordinal = ordinal_] {
    static_cast<void>(cudaSetDevice(ordinal));
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
    static_cast<void>(library.comm_abort(comm));
  });
}

bool NcclGroup::await_end(std::chrono::nanoseconds time) {
  const auto until = time_after(time);
  const std::unique_lock lock(mutex_, until);
  if (!lock.owns_lock() || comm_ != nullptr) return false;
  return ending_ == nullptr || ending_->wait_for(until - Clock::now());
}

NcclGroup::Calls::Calls(NcclGroup& group, CUstream_st* stream)
    : group_(group), stream_(stream), lock_(group.mutex_) {
  if (group_.comm_ == nullptr) {
    throw Error(ErrorCode::kState, "the communicator of NCCL has been ended");
  }
  check_nccl(group_.library_, group_.library_.group_start(), "ncclGroupStart");
  open_ = true;
}

NcclGroup::Calls::~Calls() {
  if (open_) static_cast<void>(group_.library_.group_end());
}

void NcclGroup::Calls::send(int32_t to, const void* data, int64_t bytes) {
  if (bytes == 0) return;
  check_nccl(
      group_.library_,
      group_.library_.send(data, static_cast<size_t>(bytes), kNcclByte, to, group_.comm_, stream_),
      "ncclSend");
}

void NcclGroup::Calls::recv(int32_t from, void* data, int64_t bytes) {
  if (bytes == 0) return;
  check_nccl(group_.library_,
             group_.library_.recv(data, static_cast<size_t>(bytes), kNcclByte, from, group_.comm_,
                                  stream_),
             "ncclRecv");
}

void NcclGroup::Calls::end() {
  open_ = false;
  check_nccl(group_.library_, group_.library_.group_end(), "ncclGroupEnd");
}

}  // namespace conclave::inline v0::comm
