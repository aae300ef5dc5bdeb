// The terms of adapters, A x, before the product that adds B times them.
#pragma once

#include "experts/cuda/adapters/adapter_kernel.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::experts {

enum class AdaptedProduct : uint8_t { kGateUp, kDown };

struct TermArgs {
  AdaptedProduct product = AdaptedProduct::kGateUp;
  DeviceAdapters adapters;
  TermSource source;
  GroupedRows groups;
  int64_t num_experts = 0;
  AdapterTerms out;
};

// Writes RowFactors for every sorted row, and terms for those that have factors. A row's terms
// depend on that row and its adapter only. One launch, which waits for all before it.
void make_terms(const TermArgs& args, CUstream_st* stream);

// The same for a product of a call, whose rows are `source`.
inline void make_adapter_terms(const AdaptedCall& call, AdaptedProduct product,
                               const ExpertsProblem& problem, const TermSource& source,
                               CUstream_st* stream) {
  make_terms({.product = product,
              .adapters = call.adapters,
              .source = source,
              .groups = call.experts.groups,
              .num_experts = problem.num_local_experts,
              .out = product == AdaptedProduct::kGateUp ? call.up : call.down},
             stream);
}

}  // namespace conclave::inline v0::experts
