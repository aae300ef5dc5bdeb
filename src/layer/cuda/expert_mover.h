// Moves experts in device memory: their planes travel as bytes, whatever they mean, from GPU to GPU
// where the communicator carries such memory and otherwise by way of the host.
#pragma once

#include "cuda/stream.h"
#include "layer/cuda/pinned_ring.h"
#include "layer/cuda/placement_switch.h"
#include "layer/cuda/plan.h"
#include "layer/cuda/upload_lanes.h"
#include "layer/cuda/weight_fence.h"
#include "layer/cuda/weight_planes.h"
#include "layer/cuda/weights.h"
#include "layer/migration/device_mover.h"
#include "layer/refit/forward_gate.h"

#include "conclave/context.h"

#include <array>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <span>
#include <vector>

namespace conclave::inline v0 {

// Whether scales are short is known to the host alone: it goes along with an expert.
struct ExpertTraits {
  uint64_t gate_up_is_short = 1;
  uint64_t down_is_short = 1;
};

// A layer keeps this from one move of experts to the next.
struct MoveMemory {
  PlacementSwitch next;
  DeviceMemory temporary;  // all planes of an expert
  ExpertTraits temporary_traits;
};

// Experts move within these, all of which outlive the mover.
struct MovedWeights {
  const Context& context;
  DeviceAllocator& allocator;
  const CudaPlan& plan;
  CudaWeights& live;
  MoveMemory& memory;
  WeightFence& fence;
  ForwardGate& gate;
};

// Ranks must have these in common: the planes of an expert, and what their bytes mean.
int64_t key_of_planes(const CudaPlan& plan, const CudaWeights& weights);

class CudaExpertMover final : public DeviceMover {
 public:
  explicit CudaExpertMover(const MovedWeights& layer);
  CudaExpertMover(const CudaExpertMover&) = delete;
  CudaExpertMover& operator=(const CudaExpertMover&) = delete;
  ~CudaExpertMover() override;

  void open() override;
  void make_temporary(bool wanted) override;
  MoveHashes move(const MoveCall& call) override;
  void prepare(const EpochPointer& next) override;
  void await_device() override;
  void enter(const EpochPointer& next) override;
  void close() noexcept override;

 private:
  // The planes of the expert in one place, of both halves.
  using Slot = std::vector<std::span<std::byte>>;

  cudaStream_t queue() const { return stream_.get(); }
  MlpSource all() const;
  Slot slot_at(int32_t place) const;
  bool is_temporary(int32_t place) const { return place >= layer_.plan.part.num_places(); }
  ExpertTraits traits_of(int32_t place) const;
  void set_traits(int32_t place, const ExpertTraits& traits);
  void await_switch();
  void between_pieces(const MoveCall& call) const;
  template <class Visit>
  void for_each_piece(const MoveCall& call, int32_t place, const Visit& visit) const;
  uint64_t hash(int32_t place);
  void copy(const MoveCall& call, const ExpertMove& move);
  void send(const MoveCall& call, const ExpertMove& move);
  void receive(const MoveCall& call, const ExpertMove& move);
  void fill(const MoveCall& call, const ExpertMove& move);
  ExpertTraits fill_halves(const WeightSource& source, int32_t expert, Slot& filled);
  std::span<std::byte> pinned(size_t bytes);

  MovedWeights layer_;
  bool is_open_ = false;
  cuda::OwnedStream stream_;
  DeviceMemory sum_;                      // a hash adds up here
  std::array<CudaMlpWeights, 2> staged_;  // an expert that comes from a source, by halves
  bool has_staged_ = false;
  PinnedRing ring_;
  PinnedRings rings_;  // for experts that come from a source
};

}  // namespace conclave::inline v0
