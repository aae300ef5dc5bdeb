// A refit of weights in device memory. Their addresses stay in every mode, so that kernels, tensor
// maps and captured graphs stay what they are: staged weights are uploaded beside those that
// forwards read and copied over them, on the device, in the order of streams.
#pragma once

#include "cuda/stream.h"
#include "layer/cuda/plan.h"
#include "layer/cuda/upload_lanes.h"
#include "layer/cuda/weight_fence.h"
#include "layer/cuda/weights.h"
#include "layer/refit/engine_refit.h"

#include "conclave/context.h"
#include "conclave/interop/cuda.h"

#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

// Memory that a refit has uploaded to, for the next one of the same experts.
struct StagedHalf {
  CudaMlpWeights CudaWeights::*held = nullptr;
  MlpHalf half = MlpHalf::kGateUp;
  std::vector<int64_t> places = {};  // in the layer
  CudaMlpWeights staged;
};
// A refit that keeps its memory leaves this for the next one.
struct RefitMemory {
  std::vector<StagedHalf> halves;
  PinnedRings rings;
};

// A refit works on these, all of which outlive it.
struct RefittedWeights {
  const Context& context;
  DeviceAllocator& allocator;
  const CudaPlan& plan;
  CudaWeights& live;
  RefitMemory& spare;
  WeightFence& fence;
};

class CudaRefit final : public EngineRefit {
 public:
  // On the current device. Throws Error: kUnsupported for experts that are read where their source
  // has them, unless in place, and for halves of experts whose columns have an order; kOutOfMemory.
  CudaRefit(const RefittedWeights& layer, const RefitRequest& request);
  CudaRefit(const CudaRefit&) = delete;
  CudaRefit& operator=(const CudaRefit&) = delete;
  ~CudaRefit() override;

  void stage(const StageCall& call) override;
  void prepare() override;
  void publish() override;
  void settle() override;

 private:
  // One half of the experts of an MLP that the scope touches.
  struct Half {
    CudaMlpWeights CudaWeights::*held = nullptr;
    MlpHalf half = MlpHalf::kGateUp;
    MlpSource all;                     // as the layer holds them
    MlpSource touched;                 // placed in `staged`, or in the layer
    std::vector<int64_t> places = {};  // in the layer
    CudaMlpWeights staged = {};        // none in place
  };

  cudaStream_t queue() const { return stream_.get(); }
  void add_mlp(const MlpSource& all, CudaMlpWeights CudaWeights::*held, const RefitUnits& scope);
  void make_room(Half& half);
  bool take_spare(Half& half);
  CudaMlpWeights& target_of(Half& half);
  MlpSource part_of(const Half& half, const RefitUnits& units) const;
  void check_parts(const StageCall& call) const;
  void stage_own(const StageCall& call, WeightUpload& upload);
  void fill(Half& half, const MlpSource& part, const WeightSource& source, UploadLanes& lanes);
  void leave_memory();
  void copy_half(const Half& half);
  void copy(const void* from, void* to, size_t bytes);

  const Context& context_;
  DeviceAllocator& allocator_;
  const CudaPlan& plan_;
  CudaWeights& live_;
  RefitMemory& spare_;
  WeightFence& fence_;
  const RefitMode mode_;
  const bool keeps_memory_;
  cuda::OwnedStream stream_;
  PinnedRings rings_;
  std::vector<Half> halves_;  // both halves of an MLP follow each other
  CudaWeights own_;           // what is staged of the layer's own weights
};

}  // namespace conclave::inline v0
