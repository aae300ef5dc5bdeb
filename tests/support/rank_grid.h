// Runs one function per rank of a grid of expert-parallel by tensor-parallel ranks, each on its own
// thread with its two communicators.
#pragma once

#include "conclave/comm.h"
#include "conclave/context.h"
#include "conclave/spec.h"

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

namespace conclave::testing {

struct GridRank {
  int32_t ep_rank = 0;
  int32_t tp_rank = 0;
  Communicator* communicator = nullptr;         // connects the ranks with this tp_rank
  Communicator* tensor_communicator = nullptr;  // connects the ranks with this ep_rank

  ContextOptions context_options() const {
    ContextOptions options;
    options.num_threads = 1;
    options.communicator = communicator;
    options.tensor_communicator = tensor_communicator;
    return options;
  }
  ParallelSpec in(ParallelSpec parallel) const {
    parallel.ep_rank = ep_rank;
    parallel.tp_rank = tp_rank;
    return parallel;
  }
};

// Returns every rank's exception, null if there was none, in the order of (ep_rank, tp_rank). Ranks
// of a group of one have no communicator.
template <class Body>
std::vector<std::exception_ptr> run_grid(int32_t ep_size, int32_t tp_size, const Body& body) {
  using Group = std::vector<std::unique_ptr<Communicator>>;
  const auto make_groups = [](int32_t count, int32_t size) {
    std::vector<Group> groups;
    for (int32_t i = 0; i < count; ++i) {
      groups.push_back(make_local_group({.num_ranks = size, .timeout = std::chrono::seconds(60)}));
    }
    return groups;
  };
  const std::vector<Group> expert_groups = make_groups(tp_size, ep_size);
  const std::vector<Group> tensor_groups = make_groups(ep_size, tp_size);
  std::vector<std::exception_ptr> errors(static_cast<size_t>(ep_size) *
                                         static_cast<size_t>(tp_size));
  std::vector<std::thread> threads;
  for (size_t ep = 0; ep < tensor_groups.size(); ++ep) {
    for (size_t tp = 0; tp < expert_groups.size(); ++tp) {
      threads.emplace_back([&, ep, tp] {
        Communicator* const expert = expert_groups[tp][ep].get();
        Communicator* const tensor = tensor_groups[ep][tp].get();
        try {
          body(GridRank{.ep_rank = static_cast<int32_t>(ep),
                        .tp_rank = static_cast<int32_t>(tp),
                        .communicator = ep_size > 1 ? expert : nullptr,
                        .tensor_communicator = tp_size > 1 ? tensor : nullptr});
        } catch (...) {
          errors[ep * expert_groups.size() + tp] = std::current_exception();
          expert->abort("rank failed");
          tensor->abort("rank failed");
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// Does what run_grid does, and rethrows the first exception.
template <class Body>
void on_grid(int32_t ep_size, int32_t tp_size, const Body& body) {
  for (const std::exception_ptr& error : run_grid(ep_size, tp_size, body)) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace conclave::testing
