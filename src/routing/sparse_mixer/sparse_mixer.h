// Router "sparse_mixer": two choices from separate masked softmaxes (PhiMoE, arXiv 2409.12136).
#pragma once

#include "routing/router.h"

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"

#include <memory>
#include <random>

namespace conclave::inline v0::routing {

// Needs k = 2 of at least two experts; a call may ask for the first choice alone.
Support sparse_mixer_supports(const MoeSpec& spec);
std::unique_ptr<Router> make_sparse_mixer_router(const MoeSpec& spec);
void check_sparse_mixer(const MoeSpec& spec);
void refuse_sparse_mixer_fields(const RouterSpec& other);
void limit_sparse_mixer_fields(const RouterSpec& any);
ReferenceChoice sparse_mixer_oracle(const MoeSpec& spec, const ReferenceToken& token);
void draw_sparse_mixer(std::mt19937& generator, MoeSpec& spec);
extern const DeviceRouterRow kSparseMixerOnDevice;

}  // namespace conclave::inline v0::routing
