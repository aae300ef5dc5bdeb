#include "support/rank_groups.h"

#include <chrono>

namespace conclave::testing {

void on_every_group(const std::function<void(int32_t, Communicator&)>& body) {
  const auto communicator = connect("mpi", {.timeout = std::chrono::seconds(60)});
  body(communicator->rank(), *communicator);
}

}  // namespace conclave::testing
