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
  // The launch before this one began when the grouping was done, so that tiles and factors may be
  // read before it has ended.
  bool groups_are_done = false;
  AdapterTerms out;
};

// Writes RowFactors for every sorted row, and terms for those that have factors. A row's terms
// depend on that row and its adapter only. One launch, which ends after all before it; the next may
// begin when this one knows the grouping.
void make_terms(const TermArgs& args, CUstream_st* stream);

// The same for a product of a call, whose rows are `source`.
inline void make_adapter_terms(const AdaptedCall& call, AdaptedProduct product,
                               const TermSource& source, CUstream_st* stream) {
  make_terms({.product = product,
              .adapters = call.adapters,
              .source = source,
              .groups = call.experts.groups,
              .groups_are_done = product == AdaptedProduct::kDown,
              .out = product == AdaptedProduct::kGateUp ? call.up : call.down},
             stream);
}

}  // namespace conclave::inline v0::experts
