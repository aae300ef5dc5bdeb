#include "core/catalog.h"

#include "comm/communicator.h"

#include <array>
#include <string>

namespace conclave::inline v0::comm {
namespace {

Support local_supports(const LocalGroupOptions& options) {
  if (options.num_ranks < 1) {
    return Support::no("num_ranks is " + std::to_string(options.num_ranks) + ", not at least 1");
  }
  return Support::yes();
}

constexpr std::array kCommunicators = {
    CommunicatorRow{"local", local_supports, make_local_group},
};

}  // namespace

Catalog<CommunicatorRow> communicator_catalog() { return Catalog<CommunicatorRow>(kCommunicators); }

}  // namespace conclave::inline v0::comm
