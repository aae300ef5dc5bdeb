// conclave._conclave.Layer: a MoeLayer with what a Python object has to add, that is threads,
// device checks and the life of memory.
#pragma once

#include "array_source.h"
#include "call_views.h"
#include "context.h"
#include "per_process.h"

#include "conclave/checkpoint.h"
#include "conclave/device_queue.h"
#include "conclave/layer.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

namespace conclave::python {

// Whether calls count rows by expert and take times.
enum class Counting : uint8_t { kOff, kOn };

struct LayerRequest {
  std::shared_ptr<PyContext> context;
  MoeSpec spec;
  LayerOptions options;
  ParallelSpec parallel;
  Counting counting = Counting::kOff;
};

// How far a layer may plan for larger calls than it was made for, by itself.
struct Growth {
  int64_t max_tokens = 0;
  size_t max_workspace_bytes = 0;
};

class PyLayer {
 public:
  // `kept`: a source whose memory the layer goes on using (weights on a device); may be null.
  PyLayer(const LayerRequest& request, const WeightSource& source,
          std::shared_ptr<const WeightSource> kept);

  // With the GIL held; releases it while the layer runs. Safe from several threads.
  void forward(const CallArrays& call, uintptr_t stream);
  void reload(const WeightSource& source, ReloadMode mode,
              std::shared_ptr<const WeightSource> kept);

  // Plans for calls of up to so many tokens from now on, on the weights packed already.
  void plan_for(int64_t max_tokens);
  // From now on a call of more tokens than are planned for plans anew first, for the next power of
  // two of them, as far as the limits let it.
  void grow_with_calls(const Growth& limits) noexcept;
  // Scratch memory of a call of so many tokens, for which it is planned as forward would.
  size_t workspace_bytes(int64_t tokens);

  // That of the largest plan. The smaller ones live on: other threads may be in them.
  const MoeLayer& layer() const noexcept { return *largest_.load(std::memory_order_acquire); }
  const PyContext& context() const noexcept { return *context_; }
  // Rows of each expert and nanoseconds of each stage, over all calls since the last reset.
  nb::dict stats();
  void reset_stats();

 private:
  // Of one call at a time.
  struct Counters {
    std::vector<int64_t> load;
    StageTimings timings;
  };
  struct State {
    std::shared_mutex weights_mutex;  // shared by forwards, exclusive for reload
    std::mutex plans_mutex;           // of whoever makes a plan; within the one above
    std::mutex counters_mutex;
    std::vector<std::unique_ptr<Counters>> counters;
    std::vector<Counters*> idle;
  };
  class CountersLease;

  nb::dict timings_of(const StageTimings& total) const;
  std::vector<int64_t> total_load(StageTimings& timings);
  // The layer for a call; with weights_mutex held.
  const MoeLayer& layer_for(int64_t tokens);
  const MoeLayer& grown(int64_t tokens);
  void adopt(MoeLayer layer);

  std::shared_ptr<PyContext> context_;
  std::shared_ptr<const WeightSource> kept_;
  std::vector<std::unique_ptr<MoeLayer>> plans_;  // one set of weights, ever more tokens
  std::atomic<const MoeLayer*> largest_ = nullptr;
  std::atomic<int64_t> grows_to_ = 0;  // tokens; no more than are planned for: not at all
  std::atomic<size_t> grows_to_bytes_ = 0;
  bool counts_;
  int64_t max_tokens_alone_ = 0;  // that many tokens are no work for several threads
  PerProcess<State> state_;
  std::optional<DeviceQueue> queue_;  // on CUDA, with device_load_
  DeviceTensor device_load_;          // [E] int64
};

void bind_layer(nb::module_& module);

}  // namespace conclave::python
