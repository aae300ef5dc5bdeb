// conclave._conclave.Layer: a MoeLayer with what a Python object adds: threads, device checks and
// the lifetime of memory.
#pragma once

#include "array_source.h"
#include "call_views.h"
#include "context.h"
#include "per_process.h"

#include "conclave/checkpoint.h"
#include "conclave/device_queue.h"
#include "conclave/layer.h"
#include "conclave/migration.h"
#include "conclave/refit.h"
#include "conclave/regroup.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

namespace conclave::python {

// Whether calls count rows per expert and measure times.
enum class Counting : uint8_t { kOff, kOn };

struct LayerRequest {
  std::shared_ptr<PyContext> context;
  MoeSpec spec;
  LayerOptions options;
  ParallelSpec parallel;
  Counting counting = Counting::kOff;
};

// How far a layer may plan on its own for calls larger than it was made for.
struct Growth {
  int64_t max_tokens = 0;
  size_t max_workspace_bytes = 0;
};

class PyLayer {
 public:
  // `kept` is a source whose memory the layer continues to use (weights on a device); may be null.
  PyLayer(const LayerRequest& request, const WeightSource& source,
          std::shared_ptr<const WeightSource> kept);

  // `from` on the ranks of another context; `source` may be null.
  PyLayer(PyLayer& from, std::shared_ptr<PyContext> context, const ParallelSpec& parallel,
          const WeightSource* source, std::shared_ptr<const WeightSource> kept);

  // Takes `from` to the ranks of another context (regroup). Forwards of `from` go on meanwhile.
  PyLayer(PyLayer& from, std::shared_ptr<PyContext> context, const RegroupOptions& options);
  // Joins the ranks that have the layer; what the request says of the split is not read.
  PyLayer(const LayerRequest& request, const RegroupOptions& options);
  // Gives this rank's experts to those that stay.
  void hand_over(const RegroupOptions& options);

  // Requires the GIL and releases it while the layer runs. Safe from several threads.
  void forward(const CallObjects& call, uintptr_t stream);
  void reload(const WeightSource& source, ReloadMode mode,
              std::shared_ptr<const WeightSource> kept);

  // Waits for forwards of other threads. Requires the GIL and releases it.
  void update_placement(const ExpertSlots& slots, const MigrationOptions& options);
  // Beside forwards; what it points at must outlive it.
  std::unique_ptr<Migration> begin_migration(const ExpertSlots& slots,
                                             const MigrationOptions& options);
  // The same.
  std::unique_ptr<Refit> begin_refit(const RefitOptions& options);
  // Says no in the commit of other ranks.
  void withdraw_refit(Communicator* communicator, const std::string& reason);

  // Plans for calls of up to `max_tokens` from now on, with the weights that are already packed.
  void plan_for(int64_t max_tokens);
  // From now on a call with more tokens than planned makes a new plan first, for the next power of
  // two, as far as the limits allow.
  void grow_with_calls(const Growth& limits) noexcept;
  // Bytes of scratch memory for a call of `tokens` tokens, planned as forward would.
  size_t workspace_bytes(int64_t tokens);

  // The layer with the largest plan. Smaller ones stay alive, as other threads may be using them.
  const MoeLayer& layer() const noexcept { return *largest_.load(std::memory_order_acquire); }
  // The layer that all plans share weights and placement with, for those who move its experts.
  MoeLayer& first_layer() noexcept { return *first_; }
  const PyContext& context() const noexcept { return *context_; }
  // Rows of each expert and nanoseconds of each stage, summed over all calls since the last reset.
  nb::dict stats();
  void reset_stats();

 private:
  // Used by one call at a time.
  struct Counters {
    std::vector<int64_t> load;
    StageTimings timings;
  };
  struct State {
    std::shared_mutex weights_mutex;  // shared by forwards, exclusive for reload
    std::mutex plans_mutex;           // held while making a plan, inside weights_mutex
    std::mutex counters_mutex;
    std::vector<std::unique_ptr<Counters>> counters;
    std::vector<Counters*> idle;
  };
  class CountersLease;

  nb::dict timings_of(const StageTimings& total) const;
  std::vector<int64_t> total_load(StageTimings& timings);
  // The layer for a call; requires weights_mutex.
  const MoeLayer& layer_for(int64_t tokens);
  const MoeLayer& grown(int64_t tokens);
  void adopt(MoeLayer layer);
  void prepare_counting();

  std::shared_ptr<PyContext> context_;
  std::shared_ptr<const WeightSource> kept_;
  std::vector<std::unique_ptr<MoeLayer>> plans_;  // on one set of weights; tokens ascend
  MoeLayer* first_ = nullptr;                     // others may read it while a plan is added
  std::atomic<const MoeLayer*> largest_ = nullptr;
  std::atomic<int64_t> grows_to_ = 0;  // tokens; no growth up to the planned number
  std::atomic<size_t> grows_to_bytes_ = 0;
  bool counts_;
  int64_t max_tokens_alone_ = 0;  // calls of up to this many tokens are not worth several threads
  PerProcess<State> state_;
  std::optional<DeviceQueue> queue_;  // on CUDA, with device_load_
  DeviceTensor device_load_;          // [E] int64
};

void bind_layer(nb::module_& module);

}  // namespace conclave::python
