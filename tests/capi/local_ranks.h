// Ranks that are threads of a test, and contexts that hold their communicators.
#pragma once

#include "capi/handles.h"
#include "support/layer_fixture.h"

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

// The split of a layer over ranks that hold whole experts.
inline conclave_parallel split_over(int32_t ranks, size_t rank) {
  auto parallel = sized<conclave_parallel>();
  parallel.ep_size = ranks;
  parallel.ep_rank = static_cast<int32_t>(rank);
  return parallel;
}

inline void forward(const conclave_layer* layer, const Tensor& hidden, Tensor& out,
                    const int64_t* rank_tokens = nullptr, size_t ranks = 0) {
  const conclave_tensor in = tensor_of(hidden.const_view());
  const conclave_tensor written = tensor_of(out.const_view());
  auto args = sized<conclave_forward_args>();
  args.hidden = &in;
  args.out = &written;
  args.rank_tokens = rank_tokens;
  args.rank_tokens_count = ranks;
  EXPECT_EQ(conclave_layer_forward(layer, &args), CONCLAVE_OK) << conclave_last_error_message();
}

// The first layer of the bundled model on one rank.
inline Tensor of_one_rank(const Tensor& hidden) {
  const auto context = make_context();
  const auto checkpoint = open_model();
  const auto layer = make<conclave_layer>(&conclave_layer_create_from_checkpoint, context.get(),
                                          checkpoint.get(), int64_t{0}, nullptr, nullptr);
  Tensor out(DType::kF32, hidden.shape());
  forward(layer.get(), hidden, out);
  return out;
}

// The same layer over a group, on all of whose ranks a forward has the bits of one.
inline void expect_bits_of_one(std::vector<Handle<conclave_communicator>> group) {
  const auto ranks = static_cast<int32_t>(group.size());
  on_threads(group.size(), [&](size_t rank) {
    const auto context = context_of(group[rank].get());
    group[rank].reset();  // the context holds it
    const auto checkpoint = open_model();
    const conclave_parallel parallel = split_over(ranks, rank);
    const auto layer = make<conclave_layer>(&conclave_layer_create_from_checkpoint, context.get(),
                                            checkpoint.get(), int64_t{0}, nullptr, &parallel);
    const Tensor hidden = random_tensor(DType::kBF16, 4 + int64_t(rank), 88, rank);
    Tensor out(DType::kF32, hidden.shape());
    forward(layer.get(), hidden, out);
    EXPECT_TRUE(same_bits(out, of_one_rank(hidden)));
    auto stats = sized<conclave_layer_stats>();
    EXPECT_EQ(conclave_layer_get_stats(layer.get(), &stats), CONCLAVE_OK);
    EXPECT_EQ(stats.num_local_experts, 60 / ranks);
  });
}

}  // namespace conclave::testing
