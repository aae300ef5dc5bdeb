// Times each forward of a layer over two ranks, threads of this process with one thread each: in
// turn without and with experts on their way. Prints medians, high quantiles, a histogram of how
// much longer than the median forwards took, and the processor time of both kinds.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <conclave/conclave.h>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <time.h>
#include <vector>

namespace {

using conclave::ExpertSlots;
using Clock = std::chrono::steady_clock;

struct Settings {
  int64_t experts = 64;
  int64_t hidden = 1024;
  int64_t inner = 512;
  int64_t tokens = 64;
  int32_t rounds = 10;
  int32_t forwards = 200;  // counted for each kind and round
  double share = 0.05;
  int32_t spare = 2;
};

double processor_ms() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
}

double thread_ms() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
}

// Forwards of one kind: milliseconds on the clock, and of the calling thread's processor time.
struct Times {
  std::vector<double> clock;
  std::vector<double> processor;
};

double quantile(std::vector<double> values, double part) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const auto last = static_cast<double>(values.size() - 1);
  return values[static_cast<size_t>(part * last)];
}

// Half of the experts of each rank change sides.
ExpertSlots turned(const ExpertSlots& slots) {
  ExpertSlots next = slots;
  const auto per_rank = static_cast<size_t>(slots.first_of[1]);
  for (size_t i = 0; i < per_rank; i += 2) {
    std::swap(next.logical_of[i], next.logical_of[per_rank + i]);
  }
  return next;
}

struct RankResult {
  Times still;
  Times moving;
  int64_t experts_moved = 0;
  double moving_ms = 0;
};

class RankRun {
 public:
  RankRun(const Settings& settings, conclave::Communicator& own, conclave::Communicator& second,
          const conclave::WeightSource& source, const conclave::MoeSpec& spec)
      : settings_(settings),
        own_(own),
        second_(second),
        context_({.num_threads = 1, .communicator = &own}),
        layer_(conclave::MoeLayer::create(
            context_, spec, source,
            {.max_tokens = settings.tokens, .spare_experts = settings.spare},
            {.ep_size = 2, .ep_rank = own.rank()})),
        hidden_(conclave::DType::kBF16, {settings.tokens, settings.hidden}),
        out_(conclave::DType::kBF16, {settings.tokens, settings.hidden}) {
    conclave::fill_random(hidden_.view(), static_cast<uint64_t>(own.rank()) + 1);
  }

  RankResult run() {
    RankResult result;
    Times warm;
    for (int32_t i = 0; i < settings_.forwards / 4; ++i) forward(warm);
    for (int32_t round = 0; round < settings_.rounds; ++round) {
      for (int32_t i = 0; i < settings_.forwards; ++i) forward(result.still);
      conclave::Migration migration(layer_, turned(layer_.slots()),
                                    {.communicator = &second_, .processor_share = settings_.share});
      const auto begin = Clock::now();
      // All ranks see the end at the same forward.
      while (!migration.status().is_done) {
        forward(result.moving);
        migration.check();
      }
      result.moving_ms += std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
      result.experts_moved += migration.status().experts_moved;
    }
    own_.barrier("done");
    return result;
  }

 private:
  void forward(Times& times) {
    const double processor = thread_ms();
    const auto begin = Clock::now();
    layer_.forward({.hidden = hidden_.view(), .out = out_.view()});
    times.clock.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
    times.processor.push_back(thread_ms() - processor);
  }

  const Settings& settings_;
  conclave::Communicator& own_;
  conclave::Communicator& second_;
  conclave::Context context_;
  conclave::MoeLayer layer_;
  conclave::Tensor hidden_;
  conclave::Tensor out_;
};

void print_times(const char* name, const Times& times) {
  fmt::print(
      "{:<8} {:>6}  clock ms: median {:.3f}, 90 % {:.3f}, 99 % {:.3f}, longest {:.3f};  "
      "processor ms: median {:.3f}, 99 % {:.3f}, longest {:.3f}\n",
      name, times.clock.size(), quantile(times.clock, 0.5), quantile(times.clock, 0.9),
      quantile(times.clock, 0.99), quantile(times.clock, 1), quantile(times.processor, 0.5),
      quantile(times.processor, 0.99), quantile(times.processor, 1));
}

// Parts of a hundred of forwards by how much longer than the median of the still ones they took.
void print_histogram(const Times& still, const Times& moving) {
  constexpr std::array<double, 7> kBounds = {0.05, 0.1, 0.2, 0.5, 1, 2, 5};
  const double median = quantile(still.clock, 0.5);
  const auto above = [&](const Times& times, double bound) {
    const auto count =
        std::ranges::count_if(times.clock, [&](double value) { return value - median > bound; });
    return 100.0 * static_cast<double>(count) / static_cast<double>(times.clock.size());
  };
  fmt::print("longer than the still median by more than ms:");
  for (const double bound : kBounds) fmt::print(" {:>8}", bound);
  fmt::print("\n  still, % of forwards                       ");
  for (const double bound : kBounds) fmt::print(" {:>8.2f}", above(still, bound));
  fmt::print("\n  moving, % of forwards                      ");
  for (const double bound : kBounds) fmt::print(" {:>8.2f}", above(moving, bound));
  fmt::print("\n");
}

void run(const Settings& settings) {
  conclave::MoeSpec spec;
  spec.num_experts = settings.experts;
  spec.top_k = 8;
  spec.hidden_size = settings.hidden;
  spec.intermediate_size = settings.inner;
  spec.weight_dtype = conclave::DType::kBF16;
  const auto source = conclave::make_synthetic_source(spec, 1);
  const auto own = conclave::make_local_group({.num_ranks = 2});
  const auto second = conclave::make_local_group({.num_ranks = 2});
  std::array<RankResult, 2> results;
  std::vector<std::thread> threads;
  const double processor = processor_ms();
  for (size_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      results[rank] = RankRun(settings, *own[rank], *second[rank], *source, spec).run();
    });
  }
  for (std::thread& thread : threads) thread.join();
  const RankResult& first = results.front();
  fmt::print("E={} k=8 H={} I={} bf16, {} tokens a rank, share {}, {} spare\n", settings.experts,
             settings.hidden, settings.inner, settings.tokens, settings.share, settings.spare);
  print_times("still", first.still);
  print_times("moving", first.moving);
  print_histogram(first.still, first.moving);
  const double bytes = 3.0 * static_cast<double>(settings.hidden * settings.inner) * 2;
  fmt::print("{} experts moved in {:.1f} ms, {:.1f} MB/s; whole process {:.0f} ms of processor\n",
             first.experts_moved, first.moving_ms,
             static_cast<double>(first.experts_moved) * bytes / first.moving_ms / 1e3,
             processor_ms() - processor);
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Times forwards beside experts that move");
  app.add_option("-E", settings.experts, "experts, an even number of them a rank");
  app.add_option("-H", settings.hidden, "hidden size");
  app.add_option("-I", settings.inner, "intermediate size");
  app.add_option("-T", settings.tokens, "tokens of each rank");
  app.add_option("--rounds", settings.rounds, "migrations");
  app.add_option("--forwards", settings.forwards, "still forwards before each");
  app.add_option("--share", settings.share, "of a core, for the copying thread of a rank");
  app.add_option("--spare", settings.spare, "places on each rank");
  CLI11_PARSE(app, argc, argv);
  try {
    run(settings);
  } catch (const std::exception& error) {
    fmt::print(stderr, "migration_bench: {}\n", error.what());
    return 1;
  }
  return 0;
}
