// Times forwards of a layer over expert- or tensor-parallel ranks with a GPU each, threads of this
// process that NCCL connects, in turn with two others: a rank's experts on the tokens of all ranks,
// without the exchange, and one GPU with all experts on its own tokens. All in graphs, on all GPUs
// at once.
#include "one_expert_for_all.h"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <conclave/conclave.h>
#include <cstdint>
#include <exception>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using conclave::DType;
using conclave::MoeSpec;

struct Settings {
  std::string model = "deepseek-v3";
  std::vector<int64_t> tokens = {128, 4096};
  int32_t ranks = 2;
  int32_t rounds = 7;
  int32_t forwards = 8;  // a graph has so many
  int32_t replays = 5;
  bool rounded = false;
  bool slices = false;       // tensor-parallel ranks, all with the same tokens
  int64_t intermediate = 0;  // above 0: columns of an expert instead of the model's
};

MoeSpec spec_of_model(const std::string& model) {
  if (const conclave::ModelPreset* preset = conclave::find_preset(model)) return preset->spec;
  MoeSpec spec;
  spec.num_experts = 256;
  spec.top_k = 8;
  spec.hidden_size = 7168;
  spec.intermediate_size = 2048;
  spec.weight_dtype = DType::kF8E4M3;
  spec.quant = {.weights = conclave::WeightScale::kBlock,
                .activations = conclave::ActivationScale::kGroup};
  return spec;
}

MoeSpec spec_of(const Settings& settings) {
  MoeSpec spec = spec_of_model(settings.model);
  if (settings.intermediate > 0) spec.intermediate_size = settings.intermediate;
  return spec;
}

// Distinct experts for every token, evenly over all.
std::vector<int32_t> even_ids(const MoeSpec& spec, int64_t tokens, uint64_t seed) {
  std::vector<int32_t> ids;
  uint64_t state = seed * 0x9E3779B97F4A7C15U + 1;
  while (static_cast<int64_t>(ids.size()) < tokens * spec.top_k) {
    const auto begin = ids.end() - static_cast<int64_t>(ids.size()) % spec.top_k;
    state = state * 6364136223846793005U + 1442695040888963407U;
    const auto id = static_cast<int32_t>((state >> 33) % static_cast<uint64_t>(spec.num_experts));
    if (std::find(begin, ids.end(), id) == ids.end()) ids.push_back(id);
  }
  return ids;
}

// A layer on this rank's GPU and a call of it.
class Subject {
 public:
  Subject(const conclave::Context& context, const MoeSpec& spec,
          const conclave::WeightSource& source, const conclave::LayerOptions& options,
          const conclave::ParallelSpec& parallel)
      : queue_(context),
        layer_(conclave::MoeLayer::create(context, spec, source, options, parallel)),
        workspace_(context, layer_.workspace_bytes()) {}

  // Forgets the call before. The call has `tokens` of each seed, one behind the other. With
  // `ranks`, all of them bring as many.
  void prepare(int64_t tokens, std::span<const uint64_t> seeds, int32_t ranks) {
    const MoeSpec& spec = layer_.spec();
    const int64_t all = tokens * std::ssize(seeds);
    conclave::Tensor rows(DType::kBF16, {all, spec.hidden_size});
    std::vector<int32_t> ids;
    for (size_t i = 0; i < seeds.size(); ++i) {
      const auto first = static_cast<int64_t>(i) * tokens;
      conclave::fill_random({.data = rows.as<uint16_t>() + first * spec.hidden_size,
                             .dtype = DType::kBF16,
                             .shape = {tokens, spec.hidden_size}},
                            seeds[i]);
      const std::vector<int32_t> own = even_ids(spec, tokens, seeds[i]);
      ids.insert(ids.end(), own.begin(), own.end());
    }
    hidden_ = queue_.upload(rows.const_view());
    const conclave::Shape slots{all, spec.top_k};
    ids_ = queue_.upload({.data = ids.data(), .dtype = DType::kI32, .shape = slots});
    const std::vector<float> equal(ids.size(), 1.0F / static_cast<float>(spec.top_k));
    weights_ = queue_.upload({.data = equal.data(), .dtype = DType::kF32, .shape = slots});
    out_ = queue_.allocate(DType::kBF16, {all, spec.hidden_size});
    rank_tokens_.assign(static_cast<size_t>(ranks), all);
  }
  double microseconds(int32_t forwards, int32_t replays) {
    const auto enqueue = [&] {
      for (int32_t i = 0; i < forwards; ++i) forward();
    };
    return queue_.time_ms(enqueue, replays) * 1000 / forwards;
  }
  void forward() {
    layer_.forward({.hidden = hidden_.const_view(),
                    .topk_ids = ids_.const_view(),
                    .topk_weights = weights_.const_view(),
                    .out = out_.view(),
                    .rank_tokens = rank_tokens_,
                    .workspace = &workspace_,
                    .stream = queue_.stream()});
  }
  void finish() { queue_.synchronize(); }

 private:
  conclave::DeviceQueue queue_;
  conclave::MoeLayer layer_;
  conclave::Workspace workspace_;
  conclave::DeviceTensor hidden_, ids_, weights_, out_;
  std::vector<int64_t> rank_tokens_;
};

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// Times of one kind of forward on one rank.
struct Times {
  std::vector<double> with_exchange;
  std::vector<double> without;
  std::vector<double> alone;
};

void report(const Settings& settings, const MoeSpec& spec, int64_t tokens, const Times& times) {
  const double with_exchange = median(times.with_exchange);
  const double without = median(times.without);
  fmt::print(
      "{:16} H {:5} tokens a rank {:5} ranks {}: {:8.1f} us, its experts alone {:8.1f}, "
      "exchange {:7.1f}; one GPU with all experts {:8.1f}\n",
      settings.model, spec.hidden_size, tokens, settings.ranks, with_exchange, without,
      with_exchange - without, median(times.alone));
}

void run_rank(const Settings& settings, const conclave::WeightSource& source, int32_t rank,
              conclave::Communicator& local) {
  const std::string device = "cuda:" + std::to_string(rank);
  const auto comm = conclave::connect("nccl", {.rank = rank,
                                               .size = settings.ranks,
                                               .bootstrap = &local,
                                               .device = device,
                                               .timeout = std::chrono::seconds(60)});
  const conclave::Context context({.device = device,
                                   .num_threads = 4,
                                   .communicator = comm.get(),
                                   .tensor_communicator = comm.get()});
  const MoeSpec spec = spec_of(settings);
  const int64_t most = std::ranges::max(settings.tokens);
  conclave::ParallelSpec split{.ep_size = settings.ranks, .ep_rank = rank};
  if (settings.slices) split = {.tp_size = settings.ranks, .tp_rank = rank};
  // So many ranks bring tokens of their own.
  const int32_t groups = settings.slices ? 1 : settings.ranks;
  conclave::ParallelSpec partial = split;
  partial.reduce = conclave::Reduce::kPartial;
  const auto combine =
      settings.rounded ? conclave::EpCombine::kRoundedPerRank : conclave::EpCombine::kUnreduced;
  Subject over_ranks(context, spec, source, {.max_tokens = most, .ep_combine = combine}, split);
  Subject experts(context, spec, source, {.max_tokens = most * groups}, partial);
  Subject alone(context, spec, source, {.max_tokens = most}, {});
  for (const int64_t tokens : settings.tokens) {
    // Its experts alone have the tokens of all ranks, so that they compute the same products.
    std::vector<uint64_t> seeds(static_cast<size_t>(groups));
    std::iota(seeds.begin(), seeds.end(), uint64_t{10});
    const std::span<const uint64_t> own =
        std::span(seeds).subspan(static_cast<size_t>(settings.slices ? 0 : rank), 1);
    over_ranks.prepare(tokens, own, groups);
    experts.prepare(tokens, seeds, groups);
    alone.prepare(tokens, own, 1);
    Times times;
    // No rank allocates while another's kernels wait for it.
    comm->barrier("prepared");
    for (Subject* subject : {&over_ranks, &experts, &alone}) {
      subject->forward();
      subject->finish();
      comm->barrier("loaded");
    }
    for (int32_t round = 0; round < settings.rounds; ++round) {
      const auto time = [&](Subject& subject) {
        comm->barrier("round");
        return subject.microseconds(settings.forwards, settings.replays);
      };
      times.with_exchange.push_back(time(over_ranks));
      times.without.push_back(time(experts));
      times.alone.push_back(time(alone));
    }
    if (rank == 0) report(settings, spec, tokens, times);
  }
  comm->barrier("done");
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Times expert-parallel forwards on GPUs.");
  app.add_option("--model", settings.model, "deepseek-v3, or a preset of conclave synth");
  app.add_option("--tokens", settings.tokens, "of each rank")->delimiter(',');
  app.add_option("--ranks", settings.ranks, "GPUs");
  app.add_option("--rounds", settings.rounds);
  app.add_option("--forwards", settings.forwards, "in a graph");
  app.add_option("--replays", settings.replays, "of a graph in a round");
  app.add_option("--intermediate", settings.intermediate,
                 "columns of an expert, instead of the model's: few leave more of the time to the "
                 "exchange");
  app.add_flag("--rounded", settings.rounded, "sums travel in 16 bits");
  app.add_flag("--slices", settings.slices,
               "ranks have slices of all experts, and the same tokens");
  CLI11_PARSE(app, argc, argv);
  const conclave::bench::OneExpertForAll source(spec_of(settings));
  auto group = conclave::make_local_group({.num_ranks = settings.ranks});
  std::vector<std::thread> threads;
  std::vector<std::string> errors(group.size());
  for (size_t rank = 0; rank < group.size(); ++rank) {
    threads.emplace_back([&, rank, local = std::move(group[rank])] {
      try {
        run_rank(settings, source, static_cast<int32_t>(rank), *local);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int worst = 0;
  for (const std::string& error : errors) {
    if (error.empty()) continue;
    fmt::print(stderr, "{}\n", error);
    worst = 1;
  }
  return worst;
}
