// The cases of every communicator, over one in functions of C.
#include "capi/own_communicator.h"
#include "capi/own_transport.h"
#include "support/rank_groups.h"
#include "support/thread_ranks.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {

void on_every_group(const std::function<void(int32_t, Communicator&)>& body) {
  for (const int32_t ranks : {1, 2, 3, 4}) {
    SCOPED_TRACE("own, ranks " + std::to_string(ranks));
    std::vector<std::unique_ptr<Communicator>> group;
    for (auto& rank : make_local_group({.num_ranks = ranks, .timeout = std::chrono::seconds(20)})) {
      auto* const own = new OwnTransport(std::move(rank), nullptr);
      const auto functions = std::make_shared<capi::CommunicatorFunctions>(own->table, "own");
      functions->keep();
      group.push_back(std::make_unique<capi::CCommunicator>(functions));
    }
    const auto outcomes = run_ranks(std::move(group), body);
    EXPECT_EQ(first_failure(outcomes), "");
  }
}

}  // namespace conclave::testing
