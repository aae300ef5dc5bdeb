// Adapters in the memory of a GPU: of the experts and columns that this rank holds.
#pragma once

#include "experts/cuda/adapters/device_factors.h"
#include "layer/adapters/adapter_set.h"
#include "layer/cuda/device_memory.h"
#include "layer/cuda/plan.h"
#include "layer/cuda/weights.h"

#include "conclave/context.h"
#include "conclave/lora.h"

#include <cstdint>
#include <memory>
#include <span>

namespace conclave::inline v0 {

// Memory of a device that forwards may still read when it is no longer needed: its end waits for
// the device, and gives nothing back where a capture lets nobody wait.
class AdapterMemory {
 public:
  AdapterMemory() = default;
  AdapterMemory(DeviceAllocator& allocator, int32_t ordinal, size_t bytes, Stream stream);
  AdapterMemory(AdapterMemory&&) = default;
  AdapterMemory& operator=(AdapterMemory&&) = delete;
  ~AdapterMemory();

  size_t bytes() const { return memory_.bytes(); }
  std::byte* data() const { return memory_.as(); }

 private:
  int32_t ordinal_ = 0;
  DeviceMemory memory_;
};

struct CudaAdapter final : EngineAdapter {
  explicit CudaAdapter(AdapterMemory all) : memory(std::move(all)) {}

  AdapterMemory memory;
  const experts::DeviceExpertFactors* routed = nullptr;  // by local expert, shared slots included
  const experts::DeviceExpertFactors* shared = nullptr;  // those that run apart, or null
  int32_t most_terms = 0;

  size_t bytes() const override { return memory.bytes(); }
};

struct CudaAdapterTable final : EngineAdapterTable {
  explicit CudaAdapterTable(AdapterMemory all) : memory(std::move(all)) {}

  AdapterMemory memory;
  const int32_t* ids = nullptr;  // [count], ascending
  int32_t count = 0;
  const experts::DeviceExpertFactors* const* routed = nullptr;  // [count]
  const experts::DeviceExpertFactors* const* shared = nullptr;
  int32_t most_terms = 0;
};

// `adapter` is checked. `experts`: the logical expert in each place. Both wait for their copies.
// Where columns have an order nobody may exchange `weights` meanwhile.
std::unique_ptr<CudaAdapter> upload_adapter(const Context& context, const CudaPlan& plan,
                                            const CudaWeights& weights, const LoraAdapter& adapter,
                                            std::span<const int32_t> experts);
std::shared_ptr<const CudaAdapterTable> upload_adapter_table(const Context& context,
                                                             const CudaPlan& plan,
                                                             std::span<const HeldAdapter> adapters);

}  // namespace conclave::inline v0
