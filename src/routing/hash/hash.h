// Router "hash": ids = table[token id], weighed as in "topk" (first layers of DeepSeek-V4).
#pragma once

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"

#include <memory>

namespace conclave::inline v0::routing {

// Needs a table of at least one row.
Support hash_supports(const MoeSpec& spec);
std::unique_ptr<Router> make_hash_router(const MoeSpec& spec);

}  // namespace conclave::inline v0::routing
