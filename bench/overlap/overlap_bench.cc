// Times forwards of a layer over several ranks with and without overlap, the kinds in turn: ranks
// are threads of this process (local, tcp), or processes that a launcher starts (mpi). Each has one
// thread. Prints medians, least times and the processor time of rank 0's process.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <conclave/conclave.h>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <time.h>
#include <utility>
#include <vector>

namespace {

using conclave::ChunkOrder;
using conclave::CommHandle;
using conclave::CommOperation;
using conclave::Communicator;
using Clock = std::chrono::steady_clock;

struct Settings {
  std::string transport = "local";
  int32_t ranks = 2;
  int64_t experts = 64;
  int64_t top_k = 8;
  int64_t hidden = 1024;
  int64_t inner = 512;
  int64_t shared = 0;
  int64_t tokens = 512;
  int32_t rounds = 20;
  int32_t forwards = 5;
  double link_mbps = 0;
};

// A rank without what this benchmark measures, or with a slower link. In calls: bytes move while
// the rank waits, and shared experts run behind the routed ones. A link of so many MB/s takes its
// time beside the processor: a wait ends no earlier than the bytes would have come.
class Seen final : public Communicator {
 public:
  Seen(Communicator& real, bool in_calls, double link_mbps)
      : real_(real), in_calls_(in_calls), link_mbps_(link_mbps) {}
  std::string_view name() const noexcept override { return real_.name(); }
  int32_t rank() const noexcept override { return real_.rank(); }
  int32_t size() const noexcept override { return real_.size(); }
  std::chrono::nanoseconds timeout() const noexcept override { return real_.timeout(); }
  conclave::Support supports(conclave::CommFeature feature) const override {
    return real_.supports(feature);
  }
  void wait(CommHandle handle, std::chrono::nanoseconds deadline, std::string_view phase) override {
    real_.wait(handle, deadline, phase);
    const auto due = due_.find(handle.sequence);
    if (due == due_.end()) return;
    std::this_thread::sleep_until(due->second);
    due_.erase(due);
  }
  bool test(CommHandle handle, std::string_view phase) override {
    if (in_calls_) return true;
    const auto due = due_.find(handle.sequence);
    return real_.test(handle, phase) && (due == due_.end() || Clock::now() >= due->second);
  }
  void abort(std::string_view reason) noexcept override { real_.abort(reason); }

 protected:
  CommHandle start(const CommOperation& operation) override {
    CommOperation mine = operation;
    mine.in_background = operation.in_background && !in_calls_;
    const CommHandle handle = real_.begin(mine);
    if (link_mbps_ > 0 && operation.kind == conclave::CommKind::kAllToAllV) {
      due_[handle.sequence] = due_time(operation.exchange);
    }
    return handle;
  }

 private:
  // Operations share the link one after another.
  Clock::time_point due_time(const conclave::AllToAllV& exchange) {
    int64_t bytes = 0;
    for (int32_t peer = 0; peer < size(); ++peer) {
      if (peer != rank()) bytes += exchange.recv_bytes[static_cast<size_t>(peer)];
    }
    const std::chrono::duration<double> takes(static_cast<double>(bytes) / (link_mbps_ * 1e6));
    free_ = std::max(free_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(takes);
    return free_;
  }

  Communicator& real_;
  bool in_calls_;
  double link_mbps_;
  Clock::time_point free_{};
  std::map<uint64_t, Clock::time_point> due_;
};

struct Kind {
  const char* name;
  ChunkOrder order;
  bool in_calls;
};
constexpr std::array kKinds = {Kind{"in turn, in calls", ChunkOrder::kInTurn, true},
                               Kind{"in turn", ChunkOrder::kInTurn, false},
                               Kind{"micro-batches, in calls", ChunkOrder::kMicroBatches, true},
                               Kind{"micro-batches", ChunkOrder::kMicroBatches, false}};

double milliseconds(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
}

double quantile(std::vector<double> values, double part) {
  std::ranges::sort(values);
  return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1))];
}

struct Times {
  std::vector<double> clock;
  double processor = 0;  // the time of the whole process
};
using AllTimes = std::array<Times, kKinds.size()>;

conclave::MoeSpec spec_of(const Settings& settings) {
  conclave::MoeSpec spec;
  spec.num_experts = settings.experts;
  spec.top_k = settings.top_k;
  spec.hidden_size = settings.hidden;
  spec.intermediate_size = settings.inner;
  spec.weight_dtype = conclave::DType::kBF16;
  if (settings.shared > 0) {
    spec.shared = {.mode = conclave::SharedMode::kAdd, .intermediate_size = settings.shared};
  }
  return spec;
}

// One kind of layer on one rank.
struct RankLayer {
  RankLayer(const Settings& settings, const conclave::WeightSource& source, Communicator& real,
            const Kind& kind)
      : seen(real, kind.in_calls, settings.link_mbps),
        context({.num_threads = 1, .communicator = &seen}),
        layer(conclave::MoeLayer::create(
            context, spec_of(settings), source,
            {.max_tokens = settings.tokens,
             .chunk_order = kind.order,
             .micro_batch_tokens = kind.order == ChunkOrder::kMicroBatches ? 2 : 0},
            {.ep_size = real.size(), .ep_rank = real.rank()})) {}

  Seen seen;
  conclave::Context context;
  conclave::MoeLayer layer;
};

AllTimes run_rank(const Settings& settings, Communicator& real) {
  const auto source = conclave::make_synthetic_source(spec_of(settings), 1);
  std::vector<std::unique_ptr<RankLayer>> layers;
  for (const Kind& kind : kKinds) {
    layers.push_back(std::make_unique<RankLayer>(settings, *source, real, kind));
  }
  conclave::Tensor hidden(conclave::DType::kBF16, {settings.tokens, settings.hidden});
  conclave::Tensor out(conclave::DType::kBF16, {settings.tokens, settings.hidden});
  conclave::fill_random(hidden.view(), static_cast<uint64_t>(real.rank()) + 1);
  AllTimes times;
  for (int32_t round = -1; round < settings.rounds; ++round) {
    for (size_t step = 0; step < kKinds.size(); ++step) {
      const size_t at = (step + static_cast<size_t>(round + 1)) % kKinds.size();
      real.barrier("round");
      const double processor = milliseconds(CLOCK_PROCESS_CPUTIME_ID);
      for (int32_t i = 0; i < settings.forwards; ++i) {
        const double begin = milliseconds(CLOCK_MONOTONIC);
        layers[at]->layer.forward({.hidden = hidden.view(), .out = out.view()});
        if (round >= 0) times[at].clock.push_back(milliseconds(CLOCK_MONOTONIC) - begin);
      }
      real.barrier("round");
      if (round >= 0) times[at].processor += milliseconds(CLOCK_PROCESS_CPUTIME_ID) - processor;
    }
  }
  return times;
}

void print(const Settings& settings, int32_t ranks, const AllTimes& times) {
  fmt::print("{}, {} ranks: E={} k={} H={} I={} shared {} bf16, {} tokens a rank{}\n",
             settings.transport, ranks, settings.experts, settings.top_k, settings.hidden,
             settings.inner, settings.shared, settings.tokens,
             settings.link_mbps > 0 ? fmt::format(", link of {} MB/s", settings.link_mbps) : "");
  for (size_t at = 0; at < kKinds.size(); ++at) {
    const auto count = static_cast<double>(times[at].clock.size());
    fmt::print("  {:<24} median {:8.3f}  10 % {:8.3f}  least {:8.3f} ms;  processor {:8.3f} ms\n",
               kKinds[at].name, quantile(times[at].clock, 0.5), quantile(times[at].clock, 0.1),
               quantile(times[at].clock, 0), times[at].processor / count);
  }
}

// Each rank says something to all ranks of this process.
class Board {
 public:
  explicit Board(int32_t ranks) : ranks_(static_cast<size_t>(ranks)) {}
  std::vector<std::string> exchange(int32_t rank, size_t round, const std::string& mine) {
    std::unique_lock lock(mutex_);
    auto& texts = said_[round];
    texts.resize(ranks_);
    texts[static_cast<size_t>(rank)] = mine;
    ++counts_[round];
    changed_.notify_all();
    changed_.wait(lock, [&] { return counts_[round] == ranks_; });
    return texts;
  }

 private:
  size_t ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<size_t, std::vector<std::string>> said_;
  std::map<size_t, size_t> counts_;
};

void run_threads(const Settings& settings) {
  auto local = conclave::make_local_group({.num_ranks = settings.ranks});
  Board board(settings.ranks);
  AllTimes first;
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < settings.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<Communicator> own = std::move(local[static_cast<size_t>(rank)]);
      if (settings.transport == "tcp") {
        size_t round = 0;
        own = conclave::connect(
            "tcp", {.rank = rank, .size = settings.ranks, .exchange = [&](const std::string& mine) {
                      return board.exchange(rank, round++, mine);
                    }});
      }
      AllTimes times = run_rank(settings, *own);
      if (rank == 0) first = std::move(times);
    });
  }
  for (std::thread& thread : threads) thread.join();
  print(settings, settings.ranks, first);
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Times forwards over ranks with and without overlap");
  app.add_option("--transport", settings.transport, "local, tcp, or mpi behind a launcher")
      ->check(CLI::IsMember({"local", "tcp", "mpi"}));
  app.add_option("--ranks", settings.ranks, "threads, for local and tcp");
  app.add_option("-E", settings.experts, "experts");
  app.add_option("-k", settings.top_k, "experts of a token");
  app.add_option("-H", settings.hidden, "hidden size");
  app.add_option("-I", settings.inner, "intermediate size");
  app.add_option("--shared", settings.shared, "intermediate size of a shared expert");
  app.add_option("-T", settings.tokens, "tokens of each rank");
  app.add_option("--rounds", settings.rounds, "rounds of all kinds");
  app.add_option("--forwards", settings.forwards, "forwards of a kind in a round");
  app.add_option("--link", settings.link_mbps, "MB/s of a link that is to be waited for; 0: none");
  CLI11_PARSE(app, argc, argv);
  if (settings.transport != "mpi") {
    run_threads(settings);
    return 0;
  }
  const auto all = conclave::connect("mpi");
  const AllTimes times = run_rank(settings, *all);
  if (all->rank() == 0) print(settings, all->size(), times);
  return 0;
}
