// One rank's communicator of NCCL: made, and ended, within a deadline whatever NCCL waits for.
#pragma once

#include "comm/nccl/nccl_library.h"
#include "comm/nccl/nccl_work.h"

#include "conclave/version.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace conclave::inline v0::comm {

class NcclGroup {
 public:
  // Calls `make` as NcclWork, since it waits for every rank: where it is not over in time, its
  // thread is left and ends what it has made. Throws CommError(kCommTimeout);
  // Error(kDevice) for an error of NCCL.
  using Make = std::function<NcclResult(ncclComm** made)>;
  // `look` is called every few ms meanwhile, and ends the waiting by what it throws.
  NcclGroup(const NcclLibrary& library, int32_t ordinal, const Make& make,
            std::chrono::nanoseconds timeout, const std::function<void()>& look);
  // A rank alone has none.
  explicit NcclGroup(int32_t ordinal);
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  ~NcclGroup();

  int32_t ordinal() const noexcept { return ordinal_; }
  // Null for a rank alone, and after end_work.
  ncclComm* comm() const noexcept { return comm_; }

  // Calls send and recv between the two: one launch on the stream. Nothing waits for a peer.
  // Throws Error.
  class Calls {
   public:
    Calls(NcclGroup& group, CUstream_st* stream);
    Calls(const Calls&) = delete;
    Calls& operator=(const Calls&) = delete;
    ~Calls();
    void send(int32_t to, const void* data, int64_t bytes);
    void recv(int32_t from, void* data, int64_t bytes);
    void end();

   private:
    NcclGroup& group_;
    CUstream_st* stream_;
    std::unique_lock<std::timed_mutex> lock_;
    bool open_ = false;
  };

  // NCCL's word on work that is under way; kNcclSuccess after end_work.
  NcclResult async_error();
  const char* error_text(NcclResult result) const { return library_.get_error_string(result); }
  // Ends the work on the device, on a thread that nobody waits for: NCCL keeps its memory until the
  // graphs that use it are gone.
  void end_work() noexcept;
  // After end_work; false if NCCL has not ended it in time.
  bool await_end(std::chrono::nanoseconds time);

 private:
  NcclLibrary library_;
  int32_t ordinal_;
  std::timed_mutex mutex_;  // held during calls; whoever ends the work waits only so long for it
  std::atomic<ncclComm*> comm_ = nullptr;
  std::unique_ptr<NcclWork> ending_;
};

}  // namespace conclave::inline v0::comm
