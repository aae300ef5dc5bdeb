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

class PyLayer {
 public:
  // `kept`: a source whose memory the layer goes on using (weights on a device); may be null.
  PyLayer(const LayerRequest& request, const WeightSource& source,
          std::shared_ptr<const WeightSource> kept);

  // With the GIL held; releases it while the layer runs. Safe from several threads.
  void forward(const CallArrays& call, uintptr_t stream);
  void reload(const WeightSource& source, ReloadMode mode,
              std::shared_ptr<const WeightSource> kept);

  const MoeLayer& layer() const noexcept { return *layer_; }
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
    std::mutex counters_mutex;
    std::vector<std::unique_ptr<Counters>> counters;
    std::vector<Counters*> idle;
  };
  class CountersLease;

  nb::dict timings_of(const StageTimings& total) const;
  std::vector<int64_t> total_load(StageTimings& timings);

  std::shared_ptr<PyContext> context_;
  std::shared_ptr<const WeightSource> kept_;
  std::optional<MoeLayer> layer_;
  bool counts_;
  int64_t max_tokens_alone_ = 0;  // that many tokens are no work for several threads
  PerProcess<State> state_;
  std::optional<DeviceQueue> queue_;  // on CUDA, with device_load_
  DeviceTensor device_load_;          // [E] int64
};

void bind_layer(nb::module_& module);

}  // namespace conclave::python
