#include "layer/cuda/upload_lanes.h"

#include "cpu/parallel.h"
#include "cuda/device_info.h"
#include "layer/cuda/weight_fence.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <utility>

namespace conclave::inline v0 {
namespace {

// More threads than these bring no more bytes: a few fill what a device takes.
constexpr int32_t kMostLanes = 16;

// The error of the least number, whichever comes first.
class FirstError {
 public:
  bool is_set() const { return is_set_.load(std::memory_order_relaxed); }
  void set(int64_t number, std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (error_ && number_ <= number) return;
    number_ = number;
    error_ = std::move(error);
    is_set_.store(true, std::memory_order_relaxed);
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> is_set_{false};
  std::mutex mutex_;
  int64_t number_ = 0;
  std::exception_ptr error_;
};

}  // namespace

UploadLanes::UploadLanes(const WeightSource& source, cudaStream_t stream, int32_t ordinal,
                         Executor& executor, PinnedRings& rings)
    : executor_(executor), ordinal_(ordinal) {
  const auto count = static_cast<size_t>(std::min(executor.concurrency(), kMostLanes));
  if (rings.size() < count) rings.resize(count);
  for (size_t lane = 0; lane < count; ++lane) {
    lanes_.push_back(std::make_unique<WeightUpload>(source, stream, rings[lane]));
  }
}

void UploadLanes::run(int64_t count, LanesUsed used, const MakeWork& make_work) {
  std::atomic<int64_t> next{0};
  FirstError error;
  const auto work_on = [&](WeightUpload& lane) {
    int64_t number = next.fetch_add(1, std::memory_order_relaxed);
    if (number >= count) return;
    try {
      const cuda::DeviceGuard guard(ordinal_);
      const BesideCaptures beside;
      const std::function<void(int64_t)> work = make_work(lane);
      // A number that was taken is worked on, also where a larger one has failed meanwhile.
      while (number < count) {
        work(number);
        if (error.is_set()) return;
        number = next.fetch_add(1, std::memory_order_relaxed);
      }
    } catch (...) {
      error.set(number, std::current_exception());
    }
  };
  const int64_t lanes = used == LanesUsed::kOwn ? 1 : std::ssize(lanes_);
  cpu::parallel_for(executor_, std::min(count, lanes), 1, [&](int64_t begin, int64_t end, int32_t) {
    for (int64_t i = begin; i < end; ++i) work_on(*lanes_[static_cast<size_t>(i)]);
  });
  error.rethrow();
}

}  // namespace conclave::inline v0
