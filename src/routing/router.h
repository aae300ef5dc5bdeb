// The router catalog, from names to Router objects, and the oracle.
#pragma once

#include "core/catalog.h"

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace conclave::inline v0::routing {

struct RouterRow {
  std::string_view name;
  Support (*supports)(const MoeSpec& spec);
  std::unique_ptr<Router> (*make)(const MoeSpec& spec);
};
Catalog<RouterRow> router_catalog();

// One token's input to the oracle.
struct ReferenceToken {
  const double* logits = nullptr;      // [num_logits(spec)]; NaN compares as -inf
  const int32_t* given_ids = nullptr;  // [k]: weigh these instead of choosing
  int64_t token_id = 0;                // for router "hash"
  int64_t number = 0;                  // number in the call, for router "simulated"
  RouterWeights weights = {};
};
struct ReferenceChoice {
  std::vector<int32_t> ids;            // [k]
  std::vector<double> weights;         // [k]
  std::vector<double> shared_weights;  // [S], for router "sink_softmax"
  bool usable = true;                  // false if no logit is finite or +Inf
};
// The rules of RouterSpec in float64, plain and independent of the routers' code. The name must be
// that of a catalog row.
ReferenceChoice route_reference(const MoeSpec& spec, const ReferenceToken& token);

}  // namespace conclave::inline v0::routing
