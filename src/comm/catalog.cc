#include "core/catalog.h"

#include "comm/communicator.h"
#include "comm/local/connect_local.h"

#include <array>

namespace conclave::inline v0::comm {
namespace {

constexpr std::array kCommunicators = {
    CommunicatorRow{"local", "threads of one process", local_supports, connect_local,
                    make_local_group},
};

}  // namespace

Catalog<CommunicatorRow> communicator_catalog() { return Catalog<CommunicatorRow>(kCommunicators); }

}  // namespace conclave::inline v0::comm
