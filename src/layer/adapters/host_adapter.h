// Adapters in the memory of a CPU: of the experts and columns that this rank holds.
#pragma once

#include "cpu/memory.h"
#include "experts/adapters/factors.h"
#include "layer/adapters/adapter_set.h"
#include "layer/plan.h"

#include "conclave/context.h"

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace conclave::inline v0 {

struct HostAdapter final : EngineAdapter {
  cpu::Buffer memory;
  experts::MlpAdapter routed;
  experts::MlpAdapter shared;  // no experts where this rank has no shared ones

  size_t bytes() const override { return memory.size(); }
};

struct HostAdapterTable final : EngineAdapterTable {
  std::vector<const experts::MlpAdapter*> routed;
  std::vector<const experts::MlpAdapter*> shared;
};

// `adapter` is checked. `experts`: the logical expert in each place, -1 for a free one.
std::unique_ptr<HostAdapter> pack_host_adapter(const Context& context, const LayerPlan& plan,
                                               const LoraAdapter& adapter,
                                               std::span<const int32_t> experts);

std::shared_ptr<const HostAdapterTable> host_adapter_table(std::span<const HeldAdapter> adapters);

}  // namespace conclave::inline v0
