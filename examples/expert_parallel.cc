// Runs expert parallel over four ranks, here threads of one process. Each rank holds a quarter of
// the experts and of the tokens; the result is bit-identical to that of one rank.
#include "conclave/conclave.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <future>
#include <vector>

namespace {

using conclave::DType;

constexpr int32_t kRanks = 4;
constexpr int64_t kTokensPerRank = 16, kTokens = kRanks * kTokensPerRank;

conclave::MoeSpec make_spec() {
  conclave::MoeSpec spec;
  spec.num_experts = 30;  // does not divide evenly: two ranks hold eight experts, two hold seven
  spec.top_k = 4;
  spec.hidden_size = 256;
  spec.intermediate_size = 128;
  return spec;
}

// Runs tokens [first, first + count) of `hidden` into the same rows of `out`. With a communicator,
// every rank calls this at the same time.
void run_tokens(conclave::Communicator* communicator, const conclave::Tensor& hidden,
                conclave::Tensor& out, int64_t first, int64_t count) {
  const conclave::MoeSpec spec = make_spec();
  const auto source = conclave::make_synthetic_source(spec, /*seed=*/7);
  const conclave::Context context({.num_threads = 1, .communicator = communicator});
  conclave::ParallelSpec parallel;
  if (communicator != nullptr) {
    parallel.ep_size = communicator->size();
    parallel.ep_rank = communicator->rank();
  }
  const auto layer =
      conclave::MoeLayer::create(context, spec, *source, {.max_tokens = count}, parallel);
  const int64_t offset = first * spec.hidden_size;
  layer.forward({.hidden = {hidden.as<float>() + offset, DType::kF32, {count, spec.hidden_size}},
                 .out = {out.as<float>() + offset, DType::kF32, {count, spec.hidden_size}}});
}

int run() {
  const int64_t width = make_spec().hidden_size;
  conclave::Tensor hidden(DType::kF32, {kTokens, width});
  conclave::Tensor one_rank(DType::kF32, {kTokens, width});
  conclave::Tensor four_ranks(DType::kF32, {kTokens, width});
  conclave::fill_random(hidden.view(), 3);

  run_tokens(nullptr, hidden, one_rank, 0, kTokens);

  auto group = conclave::make_local_group({.num_ranks = kRanks});
  std::vector<std::future<void>> ranks;
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(std::async(std::launch::async, [&, rank] {
      run_tokens(group[static_cast<size_t>(rank)].get(), hidden, four_ranks, rank * kTokensPerRank,
                 kTokensPerRank);
    }));
  }
  for (std::future<void>& rank : ranks) rank.get();

  const bool identical =
      std::memcmp(one_rank.as<float>(), four_ranks.as<float>(), one_rank.size_bytes()) == 0;
  std::printf("%lld tokens over %d ranks: output %s one rank\n", static_cast<long long>(kTokens),
              kRanks, identical ? "bit-identical to" : "DIFFERS from");
  return identical ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
