// The router catalog: names to Router objects.
#pragma once

#include "core/catalog.h"

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"

#include <memory>
#include <string_view>

namespace conclave::inline v0::routing {

struct RouterRow {
  std::string_view name;
  Support (*supports)(const MoeSpec& spec);
  std::unique_ptr<Router> (*make)(const MoeSpec& spec);
};
Catalog<RouterRow> router_catalog();

// The same rule in float64 for one token, for the oracle. `logits` [E]; NaN compares as -inf.
// Writes k ids and weights. Returns false where the row has no finite logit (ids 0..k-1, weight 0).
bool route_reference(const MoeSpec& spec, const double* logits, int32_t* topk_ids,
                     double* topk_weights);

}  // namespace conclave::inline v0::routing
