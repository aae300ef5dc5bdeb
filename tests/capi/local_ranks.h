// Ranks that are threads of a test, and contexts that hold their communicators.
#pragma once

#include "capi/handles.h"

#include <cstdint>
#include <thread>
#include <vector>

namespace conclave::testing {

inline std::vector<Handle<conclave_communicator>> local_group(int32_t ranks,
                                                              int64_t timeout_ms = 0) {
  std::vector<conclave_communicator*> made(static_cast<size_t>(ranks));
  EXPECT_EQ(conclave_local_group(ranks, timeout_ms, made.data()), CONCLAVE_OK);
  std::vector<Handle<conclave_communicator>> group;
  for (conclave_communicator* handle : made) group.emplace_back(handle);
  return group;
}

// Runs body(rank) on a thread for each rank.
template <class Body>
void on_threads(size_t ranks, const Body& body) {
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < ranks; ++rank) threads.emplace_back([&body, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

inline Handle<conclave_context> context_of(conclave_communicator* communicator) {
  auto options = sized<conclave_context_options>();
  options.num_threads = 1;
  options.communicator = communicator;
  return make<conclave_context>(&conclave_context_create, &options);
}

}  // namespace conclave::testing
