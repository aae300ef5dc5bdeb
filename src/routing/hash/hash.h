// Router "hash": ids = table[token id], weighed as in "topk" (first layers of DeepSeek-V4).
#pragma once

#include "routing/router.h"

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"

#include <memory>
#include <random>

namespace conclave::inline v0::routing {

// Needs a table of at least one row.
Support hash_supports(const MoeSpec& spec);
std::unique_ptr<Router> make_hash_router(const MoeSpec& spec);
void check_hash(const MoeSpec& spec);
void refuse_hash_fields(const RouterSpec& other);
ReferenceChoice hash_oracle(const MoeSpec& spec, const ReferenceToken& token);
void draw_hash(std::mt19937& generator, MoeSpec& spec);
extern const DeviceRouterRow kHashOnDevice;

}  // namespace conclave::inline v0::routing
