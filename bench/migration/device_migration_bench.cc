// Experts that move between two GPUs, ranks that are threads of this process and that NCCL
// connects. Each forward is timed, in turn without and with experts on their way; then loads that
// fall like 1/n, as they lie and balanced. On one GPU replicas become those of other experts.
#include "expert_ranks/one_expert_for_all.h"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <conclave/conclave.h>
#include <cstdint>
#include <exception>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using conclave::DType;
using conclave::ExpertSlots;
using conclave::MoeSpec;
using Clock = std::chrono::steady_clock;

struct Settings {
  int32_t ranks = 2;
  std::string model = "qwen3-30b-a3b";
  std::vector<int64_t> tokens = {64, 1024};           // each rank has them, beside moves
  std::vector<int64_t> zipf = {64, 512, 2048, 8192};  // likewise, with falling loads
  int32_t rounds = 3;
  int32_t forwards = 400;
  double share = 0.05;
  size_t piece_kib = 256;
  int32_t spare = 2;
  int32_t moved = 8;  // each rank gives so many experts
  int32_t replicas = 0;
  double limit = 8;  // seconds for each migration
};

// Distinct experts for each token, drawn by weights: the largest of log w + Gumbel noise.
std::vector<int32_t> draw_ids(const std::vector<double>& weights, int64_t tokens, int64_t top_k,
                              uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform(1e-12, 1.0);
  std::vector<int32_t> ids;
  std::vector<std::pair<double, int32_t>> keys(weights.size());
  for (int64_t token = 0; token < tokens; ++token) {
    for (size_t e = 0; e < weights.size(); ++e) {
      keys[e] = {std::log(weights[e]) - std::log(-std::log(uniform(random))),
                 static_cast<int32_t>(e)};
    }
    std::ranges::partial_sort(keys, keys.begin() + top_k, std::greater());
    for (int64_t slot = 0; slot < top_k; ++slot) {
      ids.push_back(keys[static_cast<size_t>(slot)].second);
    }
  }
  return ids;
}

std::vector<double> even(int64_t experts) {
  return std::vector<double>(static_cast<size_t>(experts), 1.0);
}
std::vector<double> falling(int64_t experts) {
  std::vector<double> weights;
  for (int64_t e = 0; e < experts; ++e) weights.push_back(1.0 / static_cast<double>(e + 1));
  return weights;
}

double quantile(std::vector<double> values, double part) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1))];
}
double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Some experts of each rank change sides. On one rank, replicas become those of other experts.
ExpertSlots turned(const ExpertSlots& slots, int32_t count) {
  ExpertSlots next = slots;
  if (slots.num_ranks() == 1) {
    const auto replicas = slots.logical_of.size() - static_cast<size_t>(slots.num_experts);
    const auto half = static_cast<int32_t>(slots.num_experts / 2);
    const int32_t first = slots.logical_of.back() < half ? half : 0;
    next.logical_of.resize(static_cast<size_t>(slots.num_experts));
    std::iota(next.logical_of.begin(), next.logical_of.end(), 0);
    for (size_t i = 0; i < replicas; ++i) {
      next.logical_of.push_back(first + static_cast<int32_t>(i));
    }
    return next;
  }
  const auto per_rank = static_cast<size_t>(slots.first_of[1]);
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    std::swap(next.logical_of[i], next.logical_of[per_rank + i]);
  }
  return next;
}

class RankRun {
 public:
  RankRun(const Settings& settings, const MoeSpec& spec, const conclave::WeightSource& source,
          int32_t rank, conclave::Communicator& local)
      : settings_(settings),
        spec_(spec),
        rank_(rank),
        own_(connect(rank, local)),
        second_(connect(rank, local)),
        context_({.device = device_of(rank), .num_threads = 8, .communicator = own_.get()}),
        queue_(context_),
        layer_(conclave::MoeLayer::create(context_, spec, source,
                                          {.max_tokens = std::max(std::ranges::max(settings.tokens),
                                                                  std::ranges::max(settings.zipf)),
                                           .spare_experts = settings.spare},
                                          {.ep_size = settings.ranks,
                                           .ep_rank = rank,
                                           .num_redundant_experts = settings.replicas})),
        workspace_(context_, layer_.workspace_bytes()) {}

  void run() {
    say(fmt::format("{} on {} GPUs, {} MB of workspace each", settings_.model, settings_.ranks,
                    layer_.workspace_bytes() >> 20));
    for (const int64_t tokens : settings_.tokens) under_load(tokens);
    for (const int64_t tokens : settings_.zipf) {
      if (settings_.ranks > 1) balance(tokens);
    }
    own_->barrier("done");
  }

 private:
  // Lines come as they are known, also to a file.
  void say(const std::string& line) const {
    if (rank_ != 0) return;
    fmt::print("{:6.2f} s  {}\n", std::chrono::duration<double>(Clock::now() - begin_).count(),
               line);
    std::fflush(stdout);
  }

  static std::string device_of(int32_t rank) { return "cuda:" + std::to_string(rank); }
  std::unique_ptr<conclave::Communicator> connect(int32_t rank,
                                                  conclave::Communicator& local) const {
    if (settings_.ranks == 1) return std::move(conclave::make_local_group({.num_ranks = 1})[0]);
    return conclave::connect("nccl", {.rank = rank,
                                      .size = settings_.ranks,
                                      .bootstrap = &local,
                                      .device = device_of(rank),
                                      .timeout = std::chrono::seconds(30)});
  }

  void prepare(int64_t tokens, const std::vector<double>& weights) {
    conclave::Tensor rows(DType::kBF16, {tokens, spec_.hidden_size});
    conclave::fill_random(rows.view(), 10 + static_cast<uint64_t>(rank_));
    hidden_ = queue_.upload(rows.const_view());
    const std::vector<int32_t> ids =
        draw_ids(weights, tokens, spec_.top_k, 20 + static_cast<uint64_t>(rank_));
    load_ = std::vector<double>(weights.size(), 0.0);
    for (const int32_t id : ids) load_[static_cast<size_t>(id)] += 1;
    const conclave::Shape slots{tokens, spec_.top_k};
    ids_ = queue_.upload({.data = ids.data(), .dtype = DType::kI32, .shape = slots});
    const std::vector<float> equal(ids.size(), 1.0F / static_cast<float>(spec_.top_k));
    weights_ = queue_.upload({.data = equal.data(), .dtype = DType::kF32, .shape = slots});
    out_ = queue_.allocate(DType::kBF16, {tokens, spec_.hidden_size});
    own_->barrier("prepared");
  }
  void forward(std::vector<int64_t> rank_tokens = {}) {
    layer_.forward({.hidden = hidden_.const_view(),
                    .topk_ids = ids_.const_view(),
                    .topk_weights = weights_.const_view(),
                    .out = out_.view(),
                    .rank_tokens = rank_tokens,
                    .workspace = &workspace_,
                    .stream = queue_.stream()});
  }
  // Microseconds until the result is there.
  double timed_forward() {
    const auto begin = Clock::now();
    forward();
    queue_.synchronize();
    return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
  }

  // All ranks alike, since each makes as many forwards as the others.
  bool is_late(Clock::time_point begin) {
    const double own = std::chrono::duration<double>(Clock::now() - begin).count();
    double longest = own;
    own_->all_reduce(std::as_bytes(std::span(&own, 1)),
                     std::as_writable_bytes(std::span(&longest, 1)), DType::kF64,
                     conclave::ReduceOp::kMax, "compare clocks");
    return longest > settings_.limit;
  }
  bool is_over(const conclave::MigrationStatus& status) const {
    return status.is_done || (settings_.ranks == 1 && status.experts_moved == settings_.replicas);
  }
  std::string late(const conclave::MigrationStatus& status) const {
    return fmt::format("{} experts and {} of {} rounds in {} s: more than the limit",
                       status.experts_moved, status.rounds_done, status.rounds, settings_.limit);
  }
  void under_load(int64_t tokens) {
    prepare(tokens, even(spec_.num_experts));
    for (int32_t i = 0; i < 50; ++i) timed_forward();
    std::vector<double> still;
    std::vector<double> moving;
    std::vector<double> begins;
    double seconds = 0;
    int64_t moved = 0;
    for (int32_t round = 0; round < settings_.rounds; ++round) {
      for (int32_t i = 0; i < settings_.forwards; ++i) still.push_back(timed_forward());
      const auto begin = Clock::now();
      conclave::Migration migration(layer_, turned(layer_.slots(), settings_.moved),
                                    {.communicator = second_.get(),
                                     .processor_share = settings_.share,
                                     .piece_bytes = settings_.piece_kib << 10});
      begins.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
      // All ranks see the end at the same forward; one alone ends it when all have been copied.
      for (int64_t i = 1; !is_over(migration.status()); ++i) {
        moving.push_back(timed_forward());
        migration.check();
        if (i % 64 == 0 && is_late(begin)) throw std::runtime_error(late(migration.status()));
      }
      if (settings_.ranks == 1) migration.finish();
      seconds += std::chrono::duration<double>(Clock::now() - begin).count();
      moved += migration.status().experts_moved;
    }
    if (rank_ != 0) return;
    const auto print = [&](const char* kind, const std::vector<double>& times) {
      say(fmt::format(
          "  {:7} {:6} forwards, us: mean {:8.1f} median {:8.1f} 90 % {:8.1f} 99 % {:8.1f} "
          "99.9 % {:8.1f} longest {:8.1f}",
          kind, times.size(), mean(times), quantile(times, 0.5), quantile(times, 0.9),
          quantile(times, 0.99), quantile(times, 0.999), quantile(times, 1)));
    };
    const double bytes = static_cast<double>(moved) * 3 *
                         static_cast<double>(spec_.hidden_size * spec_.intermediate_size) * 2;
    const double typical = quantile(still, 0.5);
    const auto beyond = [&](const std::vector<double>& times) {
      return std::ranges::count_if(times, [&](double us) { return us > typical + 1000; });
    };
    say(fmt::format(
        "beside moves: {} tokens a rank, share {}, pieces of {} KiB: {} experts in {:.2f} s, "
        "{:.0f} MB/s of bf16; mean x{:.3f}, median x{:.3f}; beyond the still median by 1 ms: "
        "{} of still, {} of moving; begins in {:.0f} us",
        tokens, settings_.share, settings_.piece_kib, moved, seconds, bytes / seconds / 1e6,
        mean(moving) / mean(still), quantile(moving, 0.5) / typical, beyond(still), beyond(moving),
        mean(begins)));
    print("still", still);
    print("moving", moving);
  }

  double replayed_us(int64_t tokens) {
    const std::vector<int64_t> all(settings_.ranks, tokens);
    forward(all);
    queue_.synchronize();
    own_->barrier("loaded");
    std::vector<double> times;
    for (int32_t round = 0; round < 7; ++round) {
      own_->barrier("round");
      times.push_back(queue_.time_ms(
                          [&] {
                            for (int i = 0; i < 4; ++i) forward(all);
                          },
                          5) *
                      250);
    }
    return quantile(times, 0.5);
  }
  double most_over_mean(const ExpertSlots& slots, const std::vector<double>& load) const {
    return 1 / conclave::balancedness(load, slots);
  }
  void balance(int64_t tokens) {
    prepare(tokens, falling(spec_.num_experts));
    std::vector<double> load(load_.size());
    own_->all_reduce(std::as_bytes(std::span(load_)), std::as_writable_bytes(std::span(load)),
                     DType::kF64, conclave::ReduceOp::kSum, "add up the load");
    const ExpertSlots first = layer_.slots();
    const double before = replayed_us(tokens);
    const ExpertSlots balanced =
        conclave::balance_experts(load, {.num_ranks = settings_.ranks,
                                         .num_redundant_experts = settings_.replicas,
                                         .previous = first.logical_of});
    layer_.update_placement(balanced, {.piece_bytes = size_t{4} << 20});
    const double after = replayed_us(tokens);
    layer_.update_placement(first, {.piece_bytes = size_t{4} << 20});
    const double again = replayed_us(tokens);
    if (rank_ != 0) return;
    say(fmt::format(
        "loads as 1/n: {} tokens a rank, {} replicas: {:.1f} us, balanced {:.1f}, as before "
        "{:.1f}: x{:.3f}; the busiest rank has {:.3f} of the mean, balanced {:.3f}: bound "
        "x{:.3f}",
        tokens, settings_.replicas, before, after, again, (before + again) / 2 / after,
        most_over_mean(first, load), most_over_mean(balanced, load),
        most_over_mean(first, load) / most_over_mean(balanced, load)));
  }

  const Clock::time_point begin_ = Clock::now();
  const Settings& settings_;
  const MoeSpec& spec_;
  const int32_t rank_;
  std::unique_ptr<conclave::Communicator> own_;
  std::unique_ptr<conclave::Communicator> second_;
  conclave::Context context_;
  conclave::DeviceQueue queue_;
  conclave::MoeLayer layer_;
  conclave::Workspace workspace_;
  conclave::DeviceTensor hidden_, ids_, weights_, out_;
  std::vector<double> load_;
};

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Times forwards over two GPUs beside experts that move, and after balancing");
  app.add_option("--model", settings.model, "a preset of conclave synth");
  app.add_option("--tokens", settings.tokens, "of each rank, beside moves")->delimiter(',');
  app.add_option("--zipf", settings.zipf, "of each rank, of loads that fall")->delimiter(',');
  app.add_option("--rounds", settings.rounds, "migrations");
  app.add_option("--forwards", settings.forwards, "without moves, before each");
  app.add_option("--share", settings.share, "of a core, for the copying thread of a rank");
  app.add_option("--piece", settings.piece_kib, "KiB of one message");
  app.add_option("--spare", settings.spare, "places on each rank");
  app.add_option("--moved", settings.moved, "experts of each rank that change sides");
  app.add_option("--replicas", settings.replicas, "redundant experts");
  app.add_option("--limit", settings.limit, "seconds for each migration");
  app.add_option("--ranks", settings.ranks, "GPUs: 1 or 2")->check(CLI::Range(1, 2));
  CLI11_PARSE(app, argc, argv);
  const conclave::ModelPreset* const preset = conclave::find_preset(settings.model);
  if (preset == nullptr) {
    fmt::print(stderr, "no preset {}\n", settings.model);
    return 1;
  }
  const conclave::bench::OneExpertForAll source(preset->spec);
  auto group = conclave::make_local_group({.num_ranks = settings.ranks});
  std::vector<std::thread> threads;
  std::vector<std::string> errors(group.size());
  for (size_t rank = 0; rank < group.size(); ++rank) {
    threads.emplace_back([&, rank, local = std::move(group[rank])] {
      try {
        RankRun(settings, preset->spec, source, static_cast<int32_t>(rank), *local).run();
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) {
    if (!error.empty()) fmt::print(stderr, "{}\n", error);
  }
  return std::ranges::all_of(errors, &std::string::empty) ? 0 : 1;
}
