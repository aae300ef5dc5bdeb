#include "layer/cuda/weight_fence.h"

#include "cuda/check.h"

#include <utility>

namespace conclave::inline v0 {

// It fails only where every other call fails as well.
BesideCaptures::BesideCaptures() noexcept
    : is_changed_(cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess) {}

BesideCaptures::~BesideCaptures() {
  if (is_changed_) static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
}

WeightFence::Reading::Reading(WeightFence& fence, cudaStream_t stream)
    : fence_(fence),
      stream_(stream),
      is_watched_(fence.is_watched_.load(std::memory_order_acquire)) {
  if (is_watched_ && fence_.is_captured(stream)) is_watched_ = false;
  if (is_watched_) fence_.follow_copies(stream_);
}

void WeightFence::Reading::end() {
  if (std::exchange(is_watched_, false)) fence_.note(stream_);
}

WeightFence::Reading::~Reading() {
  try {
    end();
  } catch (const std::exception&) {
    // The device has failed, and copies will find that as well.
    return;
  }
}

void WeightFence::watch() {
  if (copied_ == nullptr) copied_ = cuda::make_event();
  is_watched_.store(true, std::memory_order_release);
}

bool WeightFence::is_captured(cudaStream_t stream) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cuda::check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void WeightFence::follow_copies(cudaStream_t stream) const {
  if (!has_copies_.load(std::memory_order_acquire)) return;
  cuda::check(cudaStreamWaitEvent(stream, copied_.get(), 0), "cudaStreamWaitEvent");
}

void WeightFence::await_copies() const {
  if (!has_copies_.load(std::memory_order_acquire)) return;
  cuda::check(cudaEventSynchronize(copied_.get()), "cudaEventSynchronize");
}

namespace {

// An event that has not passed leaves an error, which a check of a launch would find.
bool has_passed(cudaEvent_t event) {
  if (cudaEventQuery(event) == cudaSuccess) return true;
  static_cast<void>(cudaGetLastError());
  return false;
}

}  // namespace

// A mark serves another stream once its forward has passed.
WeightFence::Mark& WeightFence::mark_of(cudaStream_t stream) {
  Mark* passed = nullptr;
  for (Mark& mark : marks_) {
    if (mark.stream == stream) return mark;
    if (passed == nullptr && has_passed(mark.passed.get())) passed = &mark;
  }
  if (passed == nullptr) {
    marks_.push_back({.passed = cuda::make_event()});
    passed = &marks_.back();
  }
  passed->stream = stream;
  return *passed;
}

void WeightFence::note(cudaStream_t stream) {
  const BesideCaptures beside;
  const std::lock_guard lock(mutex_);
  Mark& mark = mark_of(stream);
  // The handle may be that of another stream, destroyed while its forward runs: the new one follows
  // it then, so that one event stands for both.
  cuda::check(cudaStreamWaitEvent(stream, mark.passed.get(), 0), "cudaStreamWaitEvent");
  cuda::check(cudaEventRecord(mark.passed.get(), stream), "cudaEventRecord");
}

void WeightFence::follow_readers(cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  for (const Mark& mark : marks_) {
    cuda::check(cudaStreamWaitEvent(stream, mark.passed.get(), 0), "cudaStreamWaitEvent");
  }
}

void WeightFence::publish(cudaStream_t stream) {
  cuda::check(cudaEventRecord(copied_.get(), stream), "cudaEventRecord");
  has_copies_.store(true, std::memory_order_release);
}

}  // namespace conclave::inline v0
