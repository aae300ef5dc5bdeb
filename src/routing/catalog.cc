#include "core/catalog.h"

#include "routing/hash/hash.h"
#include "routing/router.h"
#include "routing/simulated/simulated.h"
#include "routing/sink_softmax/sink_softmax.h"
#include "routing/sparse_mixer/sparse_mixer.h"
#include "routing/topk/topk.h"

#include <array>

namespace conclave::inline v0::routing {
namespace {

// The spec's name decides, not the order. src/core/router_rule.cc has the same names.
constexpr std::array kRouters = {
    RouterRow{"topk", topk_supports, make_topk_router},
    RouterRow{"hash", hash_supports, make_hash_router},
    RouterRow{"sparse_mixer", sparse_mixer_supports, make_sparse_mixer_router},
    RouterRow{"sink_softmax", sink_softmax_supports, make_sink_softmax_router},
    RouterRow{"simulated", simulated_supports, make_simulated_router},
};

}  // namespace

Catalog<RouterRow> router_catalog() { return Catalog<RouterRow>(kRouters); }

}  // namespace conclave::inline v0::routing
