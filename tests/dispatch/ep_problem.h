// Runs the stand-in layer of dispatch_problem.h over thread ranks.
#pragma once

#include "dispatch/dispatch_problem.h"
#include "dispatch/dispatcher.h"
#include "support/thread_ranks.h"

#include "conclave/comm.h"
#include "conclave/placement.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::testing {

struct EpCase {
  int32_t ranks = 1;
  int64_t experts = 8;
  int64_t top_k = 2;
  int64_t hidden = 24;
  int64_t max_tokens = 16;
  PlacementStrategy placement = PlacementStrategy::kLinear;
  EpTransport transport = EpTransport::kVariable;
  EpCombine combine = EpCombine::kUnreduced;
};

inline std::string describe(const EpCase& c) {
  return "ranks " + std::to_string(c.ranks) + ", experts " + std::to_string(c.experts) +
         ", top_k " + std::to_string(c.top_k) + ", hidden " + std::to_string(c.hidden) +
         (c.placement == PlacementStrategy::kLinear ? ", linear" : ", round-robin") +
         (c.transport == EpTransport::kVariable ? ", variable" : ", fixed slots") +
         (c.combine == EpCombine::kUnreduced ? ", unreduced" : ", reduced per rank");
}

inline dispatch::DispatchProblem problem_of(const EpCase& c, int32_t rank,
                                            Communicator* communicator) {
  return {.max_tokens = c.max_tokens,
          .top_k = c.top_k,
          .num_experts = c.experts,
          .hidden_size = c.hidden,
          .row_bytes = float_row_bytes(c.hidden),
          .ep_size = c.ranks,
          .ep_rank = rank,
          .epoch = first_epoch(c.experts, {.ep_size = c.ranks, .placement = c.placement}),
          .transport = c.transport,
          .combine = c.combine,
          .communicator = communicator};
}

inline std::string_view row_name(const EpCase& c) {
  return c.transport == EpTransport::kVariable ? "ep.variable" : "ep.fixed_slots";
}

inline std::unique_ptr<dispatch::Dispatcher> make_dispatcher(const EpCase& c, int32_t rank,
                                                             Communicator& communicator) {
  return dispatch::dispatcher_catalog()
      .find(row_name(c), "dispatcher")
      .make(problem_of(c, rank, &communicator));
}

// One output per rank. Each of `steps` holds one input per rank; the outputs are those of the last
// step. All steps use one workspace, which starts poisoned.
struct EpRun {
  std::vector<std::vector<float>> outputs;
  std::vector<RankOutcome> outcomes;
};

inline EpRun run_ep(const EpCase& c, const std::vector<std::vector<TokenInput>>& steps,
                    int32_t workers = 1) {
  EpRun run;
  run.outputs.resize(static_cast<size_t>(c.ranks));
  const auto placed = make_placement(c.experts, {.ep_size = c.ranks, .placement = c.placement});
  run.outcomes =
      run_ranks(make_local_group({.num_ranks = c.ranks, .timeout = std::chrono::seconds(60)}),
                [&](int32_t rank, Communicator& communicator) {
                  const auto at = static_cast<size_t>(rank);
                  const auto dispatcher = make_dispatcher(c, rank, communicator);
                  PoisonedWorkspace workspace(dispatcher->workspace_bytes());
                  ThreadExecutor executor(workers);
                  for (const auto& inputs : steps) {
                    run.outputs[at] = run_layer(*dispatcher, inputs[at], c.top_k, c.hidden,
                                                placed.experts_of[at], workspace.span(), executor);
                  }
                });
  return run;
}

inline std::vector<TokenInput> random_inputs(const EpCase& c, const std::vector<int64_t>& tokens,
                                             uint32_t seed) {
  std::vector<TokenInput> inputs;
  for (int32_t rank = 0; rank < c.ranks; ++rank) {
    inputs.push_back(random_input(tokens[static_cast<size_t>(rank) % tokens.size()], c.top_k,
                                  c.experts, c.hidden, seed + static_cast<uint32_t>(rank)));
  }
  return inputs;
}

inline std::vector<std::vector<float>> plain_layers(const EpCase& c,
                                                    const std::vector<TokenInput>& inputs) {
  std::vector<std::vector<float>> outputs;
  for (const TokenInput& input : inputs) {
    outputs.push_back(plain_layer(input, c.top_k, c.experts, c.hidden));
  }
  return outputs;
}

}  // namespace conclave::testing
