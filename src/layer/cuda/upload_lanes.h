// Threads that bring weights to a device together: each reads, converts and copies on its own, all
// copies go one after the other on one stream.
#pragma once

#include "cuda/stream.h"
#include "layer/cuda/pinned_ring.h"
#include "layer/cuda/weight_upload.h"

#include "conclave/context.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace conclave::inline v0 {

// Calls of the driver wait for each other: work that is nothing else has one thread.
enum class LanesUsed : uint8_t { kAll, kOwn };

// Pinned memory of each lane; it may serve one upload after the other.
using PinnedRings = std::vector<PinnedRing>;

// Serves one thread, which works beside those of the executor.
class UploadLanes {
 public:
  // `stream` is one of cuda:`ordinal`. Source, executor and rings outlive this.
  UploadLanes(const WeightSource& source, cudaStream_t stream, int32_t ordinal, Executor& executor,
              PinnedRings& rings);

  // For work of the calling thread alone.
  WeightUpload& own() { return *lanes_.front(); }
  // For copies of such blocks.
  LanesUsed used_for(const BlockRequest& request) const {
    return lanes_.front()->only_enqueues(request) ? LanesUsed::kOwn : LanesUsed::kAll;
  }

  // Calls make_worker(lane) once on each thread that takes part, then what it returned with each
  // number from 0 to count - 1, ascending on each thread. Waits for the threads, not for copies.
  // Throws what the least number that failed has thrown; larger ones may be left out then.
  template <class MakeWorker>
  void for_each(int64_t count, const MakeWorker& make_worker, LanesUsed used = LanesUsed::kAll) {
    run(count, used,
        [&](WeightUpload& lane) -> std::function<void(int64_t)> { return make_worker(lane); });
  }

  void finish() { own().finish(); }

 private:
  using MakeWork = std::function<std::function<void(int64_t)>(WeightUpload& lane)>;
  void run(int64_t count, LanesUsed used, const MakeWork& make_work);

  Executor& executor_;
  int32_t ordinal_;
  std::vector<std::unique_ptr<WeightUpload>> lanes_;
};

}  // namespace conclave::inline v0
