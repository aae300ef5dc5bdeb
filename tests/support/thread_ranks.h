// Runs one function per rank of a group, each on its own thread with its own communicator.
#pragma once

#include "conclave/comm.h"
#include "conclave/error.h"

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace conclave::testing {

// How a rank ended: empty, or the error it threw.
struct RankOutcome {
  std::optional<ErrorCode> code;
  int32_t peer = -1;
  std::string phase;
  std::string message;
};

// Calls body(rank, communicator). A rank's communicator is destroyed when its body has returned or
// thrown, as it would be with the rank itself.
template <class Body>
std::vector<RankOutcome> run_ranks(std::vector<std::unique_ptr<Communicator>> communicators,
                                   const Body& body) {
  std::vector<RankOutcome> outcomes(communicators.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < communicators.size(); ++rank) {
    threads.emplace_back([&, rank, communicator = std::move(communicators[rank])]() mutable {
      RankOutcome& outcome = outcomes[rank];
      try {
        body(static_cast<int32_t>(rank), *communicator);
      } catch (const CommError& error) {
        outcome = {error.code(), error.peer(), error.phase(), error.what()};
      } catch (const Error& error) {
        outcome = {error.code(), -1, {}, error.what()};
      } catch (const std::exception& error) {
        outcome = {ErrorCode::kInternal, -1, {}, error.what()};
      }
      communicator.reset();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

// Returns the first failure as text, empty if every rank succeeded.
inline std::string first_failure(const std::vector<RankOutcome>& outcomes) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank].code) return "rank " + std::to_string(rank) + ": " + outcomes[rank].message;
  }
  return {};
}

}  // namespace conclave::testing
