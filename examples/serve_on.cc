// Serves on after ranks have died. Run it under MPI with several ranks, and kill one of them:
//   mpirun --enable-recovery -n 3 serve_on [ROUNDS] [VICTIM]
// Without a launcher it is a group of one. With VICTIM that rank kills itself in the third round.
// Every expert is on two ranks, so that nothing has to be read again after one death; experts that
// a second one takes along come from the source.
#include "conclave/conclave.h"

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

using conclave::DType;
using Clock = std::chrono::steady_clock;

constexpr int64_t kTokens = 16;

conclave::MoeSpec make_spec() {
  conclave::MoeSpec spec;
  spec.num_experts = 12;
  spec.top_k = 3;
  spec.hidden_size = 128;
  spec.intermediate_size = 96;
  return spec;
}

conclave::ParallelSpec every_expert_twice(const conclave::MoeSpec& spec, int32_t ranks,
                                          int32_t rank) {
  const conclave::ParallelSpec plain{.ep_size = ranks, .ep_rank = rank};
  if (ranks < 2) return plain;
  const auto replicas = static_cast<int32_t>(spec.num_experts);
  const std::vector<double> load(static_cast<size_t>(spec.num_experts), 1.0);
  return with_slots(plain, conclave::balance_experts(load, {.rule = "surviving",
                                                            .num_ranks = ranks,
                                                            .num_redundant_experts = replicas}));
}

// The launcher's ranks, or one alone. Silent ranks are waited for no longer than two seconds.
std::unique_ptr<conclave::Communicator> connect_ranks() {
  for (const conclave::TransportInfo& transport : conclave::transports()) {
    for (const std::string& variable : transport.launch_variables) {
      if (!transport.usable || std::getenv(variable.c_str()) == nullptr) continue;
      return conclave::connect(transport.name, {.timeout = std::chrono::seconds(2)});
    }
  }
  return conclave::connect("local");
}

// Who a rank serves with. The layer on it is destroyed first, then the context.
struct Group {
  explicit Group(std::unique_ptr<conclave::Communicator> ranks)
      : communicator(std::move(ranks)),
        context(std::make_unique<conclave::Context>(
            conclave::ContextOptions{.num_threads = 1, .communicator = communicator.get()})) {}

  std::unique_ptr<conclave::Communicator> communicator;
  std::unique_ptr<conclave::Context> context;
};

class Server {
 public:
  Server() : spec_(make_spec()), source_(conclave::make_synthetic_source(spec_, 7)) {
    group_ = std::make_unique<Group>(connect_ranks());
    layer_.emplace(conclave::MoeLayer::create(*group_->context, spec_, *source_,
                                              {.max_tokens = kTokens},
                                              every_expert_twice(spec_, ranks(), rank())));
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  ~Server() { layer_.reset(); }

  int32_t rank() const { return group_->communicator->rank(); }
  int32_t ranks() const { return group_->communicator->size(); }

  void forward(const conclave::Tensor& hidden, conclave::Tensor& out) const {
    layer_->forward({.hidden = hidden.view(), .out = out.view()});
  }

  // The least of what the ranks bring.
  int32_t earliest(int32_t mine) const {
    const int32_t negative = -mine;
    int32_t largest = 0;
    group_->communicator->all_reduce(std::as_bytes(std::span(&negative, 1)),
                                     std::as_writable_bytes(std::span(&largest, 1)), DType::kI32,
                                     conclave::ReduceOp::kMax, "agree on the round");
    return -largest;
  }

  // More ranks may die meanwhile: the group that fails then is left like the first one.
  void go_on() {
    std::vector<int32_t> old_ranks(static_cast<size_t>(ranks()));  // as the layer numbers them
    std::iota(old_ranks.begin(), old_ranks.end(), 0);
    std::vector<std::unique_ptr<Group>> tried;
    conclave::Communicator* failed = group_->communicator.get();
    while (true) {
      conclave::Survivors left = conclave::survivors(*failed);
      std::vector<int32_t> still_here;
      for (const int32_t rank : left.old_ranks) {
        still_here.push_back(old_ranks[static_cast<size_t>(rank)]);
      }
      old_ranks = std::move(still_here);
      tried.push_back(std::make_unique<Group>(std::move(left.communicator)));
      Group& next = *tried.back();
      failed = next.communicator.get();
      const conclave::ParallelSpec split = conclave::without_ranks(
          spec_.num_experts, layer_->parallel(), old_ranks, next.communicator->rank());
      try {
        *layer_ = layer_->on_ranks(*next.context, split, source_.get());
      } catch (const conclave::CommError& error) {
        std::fprintf(stderr, "another one: %s\n", error.what());
        continue;
      }
      group_ = std::move(tried.back());
      return;
    }
  }

 private:
  conclave::MoeSpec spec_;
  std::unique_ptr<conclave::WeightSource> source_;
  std::unique_ptr<Group> group_;
  std::optional<conclave::MoeLayer> layer_;
};

// The result of one rank alone, which each group must have.
conclave::Tensor expected_of(const conclave::Tensor& hidden) {
  const conclave::MoeSpec spec = make_spec();
  const conclave::Context context({.num_threads = 1});
  const auto layer = conclave::MoeLayer::create(
      context, spec, *conclave::make_synthetic_source(spec, 7), {.max_tokens = kTokens});
  conclave::Tensor out(DType::kF32, {kTokens, spec.hidden_size});
  layer.forward({.hidden = hidden.view(), .out = out.view()});
  return out;
}

int run(int rounds, int victim) {
  conclave::Tensor hidden(DType::kF32, {kTokens, make_spec().hidden_size});
  conclave::fill_random(hidden.view(), 3);
  const conclave::Tensor expected = expected_of(hidden);
  conclave::Tensor out(DType::kF32, hidden.view().shape);
  Server server;
  const int32_t name = server.rank();
  Clock::time_point since;
  bool has_failed = false;
  for (int round = 0; round < rounds; ++round) {
    if (round == 2 && name == victim) ::kill(::getpid(), SIGKILL);
    try {
      // A call that failed on one rank may have come through on another: all repeat it.
      if (has_failed) round = server.earliest(round);
      server.forward(hidden, out);
    } catch (const conclave::CommError& error) {
      std::printf("rank %d: %s\n", name, error.what());
      since = Clock::now();
      server.go_on();
      has_failed = true;
      --round;
      continue;
    }
    if (std::memcmp(out.as<float>(), expected.as<float>(), expected.size_bytes()) != 0) {
      std::printf("rank %d: round %d DIFFERS from one rank\n", name, round);
      return 1;
    }
    if (!std::exchange(has_failed, false)) continue;
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - since);
    std::printf("rank %d: serves on with %d ranks after %lld ms\n", name, server.ranks(),
                static_cast<long long>(took.count()));
  }
  std::printf("rank %d: %d rounds with the bits of one rank\n", name, rounds);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? std::atoi(argv[1]) : 5, argc > 2 ? std::atoi(argv[2]) : -1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
