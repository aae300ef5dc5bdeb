// Layers that go from some processes to others, which hand each other their experts.
#include "layer/split_specs.h"
#include "support/regroup_ranks.h"

#include "conclave/comm.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;
using testing::RankChange;

// The group of these ranks in the launcher's order; one of all others for those.
std::unique_ptr<Communicator> group_of(const std::vector<int32_t>& ranks, int32_t rank) {
  const int32_t group = testing::place_in(ranks, rank) >= 0 ? 0 : 1;
  return connect("mpi", {.group = group, .timeout = 60s});
}

TEST(MpiRegroup, LayersGoFromProcessToProcess) {
  const auto world = connect("mpi", {.timeout = 60s});
  for (const RankChange& change : testing::rank_changes()) {
    if (change.everyone > world->size()) continue;
    const bool takes_part = world->rank() < change.everyone;
    const auto everyone = connect("mpi", {.group = takes_part ? 0 : 1, .timeout = 60s});
    const auto before = group_of(change.before, world->rank());
    const auto after = group_of(change.after, world->rank());
    if (!takes_part) continue;
    for (const auto& [name, spec] : testing::split_specs(24, DType::kBF16)) {
      SCOPED_TRACE(name);
      testing::expect_change(
          {.spec = spec, .replicas = 2},
          {.change = change, .everyone = *everyone, .before = before.get(), .after = after.get()});
    }
  }
}

}  // namespace
}  // namespace conclave
