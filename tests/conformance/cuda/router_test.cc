// Every router of the catalog that has device code obeys its oracle there, on random specs that its
// own row draws.
#include "routing/cuda/device_router.h"
#include "routing/cuda/route.h"
#include "routing/router_cases.h"
#include "support/cuda/device_array.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace conclave {
namespace {

using routing::router_catalog;
using routing::RouterRow;
using testing::DeviceArray;
using testing::RoutingProblem;
using testing::RoutingResult;

constexpr uint32_t kDraws = 100;

// The inputs of a problem in device memory.
struct Inputs {
  DeviceArray<float> logits, bias, expert_scale, global_scale;
  DeviceArray<int32_t> given, token_ids;
  std::vector<DeviceArray<int32_t>> tensors;  // those of the router alone

  explicit Inputs(const RoutingProblem& problem)
      : logits(problem.logits),
        bias(problem.selection_bias),
        expert_scale(problem.expert_scale),
        global_scale(problem.global_scale),
        given(problem.given_ids),
        token_ids(problem.token_ids),
        tensors(tensors_of(problem)) {}

  // What the spec holds, or the problem; floats as their bits.
  static std::vector<DeviceArray<int32_t>> tensors_of(const RoutingProblem& problem) {
    std::vector<DeviceArray<int32_t>> arrays(routing::kMaxTensorsOfRouter);
    for (const routing::SizedRouterTensor& own : routing::router_tensors_of(problem.spec)) {
      const size_t place = own.place.value();
      if (own.tensor->id) {
        arrays[place] = DeviceArray<int32_t>(problem.tensors.at(place));
        continue;
      }
      const std::span<const std::byte> bytes = own.tensor->in_spec(problem.spec);
      std::vector<int32_t> words(bytes.size() / sizeof(int32_t));
      std::memcpy(words.data(), bytes.data(), bytes.size());
      arrays[place] = DeviceArray<int32_t>(words);
    }
    return arrays;
  }
};

class DeviceRouterRows : public testing::DeviceTest {
 protected:
  RoutingResult run(const RouterRow& row, const RoutingProblem& problem) {
    const MoeSpec& spec = problem.spec;
    const Inputs in(problem);
    const auto tokens = static_cast<size_t>(problem.num_tokens());
    const DeviceArray<int32_t> ids(tokens * static_cast<size_t>(spec.top_k));
    const DeviceArray<float> weights(ids.size());
    const DeviceArray<float> shared(tokens * static_cast<size_t>(testing::num_sinks(spec)));
    const DeviceArray<uint64_t> counters(std::vector<uint64_t>{0, 0});
    const std::unique_ptr<const routing::DeviceRouter> router = row.device->make(spec);
    routing::DeviceRouterArgs args = {.logits = in.logits.data(),
                                      .logits_stride = num_logits(spec),
                                      .num_tokens = problem.num_tokens(),
                                      .first_token = problem.first_token,
                                      .given_ids = or_null(in.given),
                                      .token_ids = or_null(in.token_ids),
                                      .selection_bias = or_null(in.bias),
                                      .global_scale = or_null(in.global_scale),
                                      .ids = ids.data(),
                                      .weights = weights.data(),
                                      .shared_weights = shared.data(),
                                      .tokens_without_finite_logit = counters.data(),
                                      .skipped_ids = counters.data() + 1};
    for (size_t place = 0; place < in.tensors.size(); ++place) {
      args.tensors[place] = or_null(in.tensors[place]);
    }
    const int32_t* chosen = router->route(args, stream());
    if (const routing::DeviceRoutePlan* plan = router->finish()) {
      finish(*plan, problem, in, chosen, ids, weights, counters);
      chosen = ids.data();
    }
    wait();
    for (const auto* array : {&weights, &shared}) array->expect_guard_untouched();
    ids.expect_guard_untouched();
    return {DeviceArray<int32_t>::download(chosen, ids.size()), weights.download(),
            shared.download(), static_cast<int64_t>(counters.download()[0])};
  }

 private:
  // Captures the ids as chosen, since zero experts become -1 in the slots.
  void finish(const routing::DeviceRoutePlan& plan, const RoutingProblem& problem, const Inputs& in,
              const int32_t* given, const DeviceArray<int32_t>& ids,
              const DeviceArray<float>& weights, const DeviceArray<uint64_t>& counters) {
    const DeviceArray<int32_t> slots(ids.size());
    routing::device_route(plan,
                          {.logits = in.logits.data(),
                           .logits_stride = num_logits(problem.spec),
                           .num_tokens = problem.num_tokens(),
                           .selection_bias = or_null(in.bias),
                           .expert_scale = or_null(in.expert_scale),
                           .global_scale = or_null(in.global_scale),
                           .given_ids = given,
                           .topk_ids = slots.data(),
                           .topk_weights = weights.data(),
                           .captured_ids = ids.data(),
                           .tokens_without_finite_logit = counters.data()},
                          stream());
    wait();
    slots.expect_guard_untouched();
  }
};

TEST_F(DeviceRouterRows, RandomSpecs_EqualTheOracle) {
  for (const RouterRow& row : router_catalog().rows()) {
    if (row.device == nullptr) continue;
    int32_t compared = 0;
    for (uint32_t seed = 0; seed < kDraws; ++seed) {
      testing::for_each_problem(row, seed, [&](RoutingProblem& problem, const char* what) {
        if (HasFailure() || !row.device->supports(problem.spec)) return;
        SCOPED_TRACE(std::string(what) + ", seed " + std::to_string(seed) + ", " +
                     testing::describe(problem.spec));
        const RoutingResult actual = run(row, problem);
        const RoutingResult expected = testing::oracle(problem);
        ASSERT_EQ(actual.ids, expected.ids);
        EXPECT_EQ(actual.without_finite_logit, expected.without_finite_logit);
        testing::expect_weights(actual.weights, expected.weights);
        testing::expect_weights(actual.shared_weights, expected.shared_weights);
        ++compared;
      });
      if (HasFailure()) return;
    }
    EXPECT_GT(compared, 0) << row.name << " draws nothing that the device supports";
  }
}

// Needs no GPU.
TEST(DeviceRouterRowsSupport, ARefusal_HasAReason) {
  for (const RouterRow& row : router_catalog().rows()) {
    MoeSpec spec = testing::spec_of_row(row.name);
    EXPECT_EQ(routing::find_device_router(spec), row.device) << row.name;
    spec.num_experts = 100'000;
    spec.top_k = 99'999;
    const Support support = routing::device_router_supports(spec);
    EXPECT_FALSE(support) << row.name;
    EXPECT_FALSE(support.reason().empty()) << row.name;
  }
}

}  // namespace
}  // namespace conclave
