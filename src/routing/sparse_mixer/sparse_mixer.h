// Router "sparse_mixer": two choices from separate masked softmaxes (PhiMoE, arXiv 2409.12136).
#pragma once

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"

#include <memory>

namespace conclave::inline v0::routing {

// Needs k = 2 of at least two experts.
Support sparse_mixer_supports(const MoeSpec& spec);
std::unique_ptr<Router> make_sparse_mixer_router(const MoeSpec& spec);

}  // namespace conclave::inline v0::routing
