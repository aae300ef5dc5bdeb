#include "support/rank_groups.h"
#include "support/thread_groups.h"
#include "support/thread_ranks.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace conclave::testing {

void on_every_group(const std::function<void(int32_t, Communicator&)>& body) {
  for (const ThreadGroups& row : kThreadGroups) {
    for (const int32_t ranks : {1, 2, 3, 4, 8}) {
      SCOPED_TRACE(std::string(row.name) + ", ranks " + std::to_string(ranks));
      const LocalGroupOptions options{.num_ranks = ranks, .timeout = std::chrono::seconds(20)};
      const auto outcomes = run_ranks(row.make(options), body);
      EXPECT_EQ(first_failure(outcomes), "");
    }
  }
}

}  // namespace conclave::testing
