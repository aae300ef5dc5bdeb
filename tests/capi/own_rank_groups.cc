// The cases of every communicator, over two in functions of C: one that calls a communicator of
// C++, and that of the example, which moves bytes by itself.
#include "capi/own_communicator.h"
#include "capi/own_transport.h"
#include "support/rank_groups.h"
#include "support/thread_ranks.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

extern "C" {
#include "../../examples/c/own_ranks/transport.h"
}

namespace conclave::testing {
namespace {

std::unique_ptr<Communicator> communicator_of(const conclave_own_communicator& table) {
  const auto functions = std::make_shared<capi::CommunicatorFunctions>(table, "own");
  functions->keep();
  return std::make_unique<capi::CCommunicator>(functions);
}

void on_ranks_of_the_example(int32_t ranks,
                             const std::function<void(int32_t, Communicator&)>& body) {
  SCOPED_TRACE("the example's, ranks " + std::to_string(ranks));
  const std::unique_ptr<thread_group, decltype(&thread_group_destroy)> group(
      thread_group_create(ranks), &thread_group_destroy);
  ASSERT_NE(group, nullptr);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    communicators.push_back(communicator_of(thread_group_rank(group.get(), rank, 20000)));
  }
  const auto outcomes = run_ranks(std::move(communicators), body);
  EXPECT_EQ(first_failure(outcomes), "");
}

}  // namespace

void on_every_group(const std::function<void(int32_t, Communicator&)>& body) {
  for (const int32_t ranks : {1, 2, 3, 4}) {
    SCOPED_TRACE("own, ranks " + std::to_string(ranks));
    std::vector<std::unique_ptr<Communicator>> group;
    for (auto& rank : make_local_group({.num_ranks = ranks, .timeout = std::chrono::seconds(20)})) {
      auto* const own = new OwnTransport(std::move(rank), nullptr);
      group.push_back(communicator_of(own->table));
    }
    const auto outcomes = run_ranks(std::move(group), body);
    EXPECT_EQ(first_failure(outcomes), "");
    on_ranks_of_the_example(ranks, body);
  }
}

}  // namespace conclave::testing
