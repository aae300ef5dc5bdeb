// Orders forwards and copies into the weights that they read, by events: copies follow every
// forward that was enqueued before, and forwards enqueued later follow the copies. The host waits
// for neither.
#pragma once

#include "cuda/stream.h"

#include <atomic>
#include <cuda_runtime_api.h>
#include <mutex>
#include <vector>

namespace conclave::inline v0 {

// Watching costs a forward two calls of the runtime, so that it goes on only while a refit is open.
class WeightFence {
 public:
  // A forward has this from its first enqueued work to its last. A stream that is being captured is
  // left alone: what follows its graph is the caller's to order.
  class Reading {
   public:
    Reading(WeightFence& fence, cudaStream_t stream);
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    ~Reading();
    // Throws Error(kDevice); the destructor does the same in silence, for forwards that fail.
    void end();

   private:
    WeightFence& fence_;
    cudaStream_t stream_;
    bool is_watched_;
  };

  // The next four are called while no forward is between its first work and its last, watch() and
  // unwatch() excepted: forwards under way are noted or not.
  void watch();
  void unwatch() noexcept { is_watched_.store(false, std::memory_order_relaxed); }
  // Makes `stream` follow the forwards that were noted.
  void follow_readers(cudaStream_t stream);
  // Forwards follow what `stream` holds now, until settled() says that it has passed.
  void publish(cudaStream_t stream);
  void settled() noexcept { has_copies_.store(false, std::memory_order_relaxed); }

  // Waits on the host for copies that have not settled.
  void await_copies() const;
  // Makes `stream` follow copies that have not settled.
  void follow_copies(cudaStream_t stream) const;

 private:
  // The last forward on a stream.
  struct Mark {
    cudaStream_t stream = nullptr;
    cuda::OwnedEvent passed;
  };

  bool is_captured(cudaStream_t stream) const;
  void note(cudaStream_t stream);
  Mark& mark_of(cudaStream_t stream);

  std::atomic<bool> is_watched_{false};
  std::atomic<bool> has_copies_{false};
  cuda::OwnedEvent copied_;  // made by the first watch
  std::mutex mutex_;
  std::vector<Mark> marks_;
};

// While it lives, this thread may call what a capture by another thread would forbid.
class BesideCaptures {
 public:
  BesideCaptures() noexcept;
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;
  ~BesideCaptures();

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  bool is_changed_;
};

}  // namespace conclave::inline v0
