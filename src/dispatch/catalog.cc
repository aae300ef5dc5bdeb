#include "core/catalog.h"

#include "dispatch/dispatcher.h"
#include "dispatch/ep_dispatcher.h"
#include "dispatch/local_dispatcher.h"

#include <array>

namespace conclave::inline v0::dispatch {
namespace {

constexpr std::array kDispatchers = {
    DispatcherRow{"local", local_supports, make_local_dispatcher},
    DispatcherRow{"ep.fixed_slots", ep_fixed_slots_supports, make_ep_dispatcher},
    DispatcherRow{"ep.variable", ep_variable_supports, make_ep_dispatcher},
};

}  // namespace

Catalog<DispatcherRow> dispatcher_catalog() { return Catalog<DispatcherRow>(kDispatchers); }

}  // namespace conclave::inline v0::dispatch
