#include "core/catalog.h"

#include "routing/router.h"
#include "routing/topk/topk.h"

#include <array>

namespace conclave::inline v0::routing {
namespace {

constexpr std::array kRouters = {
    RouterRow{"topk", topk_supports, make_topk_router},
};

}  // namespace

Catalog<RouterRow> router_catalog() { return Catalog<RouterRow>(kRouters); }

}  // namespace conclave::inline v0::routing
