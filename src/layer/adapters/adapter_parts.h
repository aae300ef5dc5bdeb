// A rank keeps of an adapter the factors of its experts and columns, by place.
#pragma once

#include "experts/adapters/pack.h"
#include "layer/plan_base.h"

#include "conclave/lora.h"

#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0 {

// The experts of one MLP as this rank holds them; an expert without factors is empty.
struct AdapterPart {
  experts::AdapterShape shape;
  std::vector<experts::ExpertAdapter> experts;
};

// `places`: the logical expert in each place, -1 for a free one. The factors' views stay the
// adapter's.
AdapterPart routed_adapter_part(const PlanBase& plan, const LoraAdapter& adapter,
                                std::span<const int32_t> places);
// No experts where this rank has no shared ones.
AdapterPart shared_adapter_part(const PlanBase& plan, const LoraAdapter& adapter,
                                bool holds_shared);

// The columns `slice` of the part's experts, counted from the first that this rank holds.
experts::ExpertAdapter slice_of_adapter(const experts::ExpertAdapter& expert,
                                        const TensorSlice& slice);

}  // namespace conclave::inline v0
