// conclave bench: times random real-size layers in memory against this machine's own ceilings.
#include "bench/device_bench.h"
#include "bench/measure.h"
#include "commands.h"
#include "input/machine_options.h"
#include "input/ranges.h"
#include "input/shape_options.h"
#include "layer_table.h"
#include "output/numbers.h"
#include "ranks/run_on_ranks.h"

#include "conclave/device.h"
#include "conclave/error.h"
#include "conclave/lora.h"
#include "conclave/version.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace conclave::tool {
namespace {

struct BenchOptions {
  ShapeOptions shape;
  std::string tokens = "1,16,64,256,1024";
  std::string threads;
  std::string isas;
  std::string routing = "uniform";
  MeasureOptions measure;
  bool no_ceilings = false;
  bool tune = false;
  TuneOptions tuning;
  MachineOptions machine;
  RankOptions ranks;
  OutputOptions printing;
};

std::vector<Column> columns(size_t model_width, bool has_adapters) {
  std::vector<Column> all = {{"model", "model", static_cast<int>(model_width), Align::kLeft},
                             {"tokens", "tokens", 6, Align::kRight},
                             {"threads", "threads", 7, Align::kRight},
                             {"isa", "isa", 11, Align::kLeft},
                             {"arithmetic", "arithmetic", 10, Align::kLeft},
                             {"dtype", "", 0, Align::kLeft},
                             {"routing", "", 0, Align::kLeft},
                             {"", "ms", 15, Align::kRight},
                             {"ms_mean", "", 0, Align::kRight},
                             {"ms_std", "", 0, Align::kRight},
                             {"ms_min", "min", 8, Align::kRight},
                             {"ms_median", "", 0, Align::kRight},
                             {"experts_hit", "experts", 7, Align::kRight},
                             {"tokens_per_s", "tokens/s", 9, Align::kRight},
                             {"gflops", "GFLOP/s", 8, Align::kRight},
                             {"fma_share", "of fma", 6, Align::kRight},
                             {"gbps", "GB/s", 7, Align::kRight},
                             {"read_share", "of read", 7, Align::kRight},
                             {"floor_ms", "floor ms", 8, Align::kRight},
                             {"floor_share", "of floor", 8, Align::kRight},
                             {"read_ceiling_gbps", "", 0, Align::kRight},
                             {"fma_ceiling_gflops", "", 0, Align::kRight},
                             {"repetitions", "", 0, Align::kRight},
                             {"calls", "", 0, Align::kRight},
                             {"commit", "", 0, Align::kLeft},
                             {"cpu", "", 0, Align::kLeft}};
  if (!has_adapters) return all;
  const std::vector<Column> of_adapters = {
      {"adapter_rank", "", 0, Align::kRight},    {"adapters", "", 0, Align::kRight},
      {"adapted_tokens", "", 0, Align::kLeft},   {"", "with adapters", 15, Align::kRight},
      {"adapter_ms_mean", "", 0, Align::kRight}, {"adapter_ms_median", "", 0, Align::kRight},
      {"adapter_ms_min", "", 0, Align::kRight},  {"adapter_ratio", "ratio", 5, Align::kRight}};
  all.insert(all.end(), of_adapters.begin(), of_adapters.end());
  return all;
}

std::vector<std::string> isa_list(const std::string& text) {
  std::vector<std::string> names;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    names.push_back(text.substr(begin, comma - begin));
    begin = comma + 1;
  }
  return names;
}

class BenchCommand {
 public:
  BenchCommand(const BenchOptions& options, const RankTeam& team)
      : options_(options),
        team_(team),
        format_(parse_output_format(options.printing.format)),
        measure_(options.measure),
        shapes_(resolve(options.shape)),
        tokens_(parse_number_list(options.tokens,
                                  {.option = "--tokens", .lowest = 1, .highest = 1 << 20})),
        threads_(thread_counts(options.threads)),
        isas_(isa_list(options.isas)),
        console_(team.leads() ? options.printing.progress() : ProgressMode::kOff),
        table_(team.out(), format_, columns(model_width(), options.measure.adapters.rank > 0)) {
    measure_.routing = parse_routing(options.routing);
  }

  ExitCode run() {
    const Context context = make_context(options_.machine, &console_, team_);
    check_adapters();
    if (context.device_allocator() != nullptr) return run_on_device(context);
    if (options_.tune) {
      throw Error(ErrorCode::kInvalidArgument, {.what = "kernels are tuned on a GPU",
                                                .tensor = "--tune",
                                                .hint = "name one: --device cuda:0"});
    }
    for (const int64_t threads : threads_) {
      for (const std::string& isa : isas_) bench_machine(static_cast<int32_t>(threads), isa);
    }
    table_.note("");
    for (size_t i = 1; i < machine_lines_.size(); ++i) table_.note(machine_lines_[i]);
    table_.finish("results");
    return ExitCode::kOk;
  }

 private:
  void check_adapters() const {
    const AdapterLoad& adapters = measure_.adapters;
    if (adapters.rank == 0 && adapters.count != 1) {
      throw Error(ErrorCode::kInvalidArgument, {.what = "adapters have a rank",
                                                .tensor = "--adapters",
                                                .found = std::to_string(adapters.count),
                                                .hint = "give it: --adapter-rank 16"});
    }
  }

  ExitCode run_on_device(const Context& context) {
    if (options_.tune && !team_.alone()) {
      throw Error(ErrorCode::kUnsupported, {.what = "kernels are tuned on one GPU",
                                            .tensor = "--ranks",
                                            .found = std::to_string(team_.size()),
                                            .hint = "leave out --tune, or --ranks"});
    }
    const DeviceBenchOptions device{.shapes = shapes_,
                                    .tokens = tokens_,
                                    .routing = options_.routing,
                                    .measure = measure_,
                                    .machine = options_.machine,
                                    .format = options_.printing.format};
    if (options_.tune) return run_device_tuning(context, device, options_.tuning, console_);
    return run_device_bench(team_, context, device, console_);
  }

  static std::vector<NamedShape> resolve(ShapeOptions shape) {
    if (shape.models.empty() && !any_size_given(shape)) shape.models = "qwen3-30b-a3b";
    return resolve_shapes(shape);
  }

  static std::vector<int64_t> thread_counts(const std::string& text) {
    if (text.empty()) return {0};
    return parse_number_list(text, {.option = "--threads", .lowest = 1, .highest = 4096});
  }

  size_t model_width() const {
    size_t width = 0;
    for (const NamedShape& shape : shapes_) width = std::max(width, shape.name.size());
    return width;
  }

  void bench_machine(int32_t threads, const std::string& isa) {
    MachineOptions machine = options_.machine;
    machine.threads = threads;
    machine.isa = isa;
    const Context context = make_context(machine, &console_, team_);
    ceilings_.reset();
    // They are those of a machine that nobody else uses.
    if (!options_.no_ceilings && team_.alone()) {
      console_.subject("ceilings");
      ceilings_ = measure_ceilings(context);
      console_.subject("");
      console_.clear();
    }
    note_machine(context);
    const int64_t most_tokens = *std::max_element(tokens_.begin(), tokens_.end());
    const int64_t planned = std::min(most_tokens, LayerOptions().max_tokens);
    for (const NamedShape& shape : shapes_) {
      LayerOptions of_layer = layer_options(machine, planned);
      of_layer.max_adapter_rank = measure_.adapters.rank;
      BenchLayers layers(team_, context, shape, of_layer, measure_.adapters, measure_.seed,
                         console_);
      print_shape(shape, layers);
      for (const int64_t tokens : tokens_) {
        table_.row(cells(shape, layers.plan(), context.executor().concurrency(), tokens,
                         layers.measure(tokens, measure_)));
      }
    }
  }

  void note_machine(const Context& context) {
    std::string line = machine_line(context);
    if (ceilings_) {
      line += fmt::format("\nceilings: read {:.1f} GB/s; multiply-add", ceilings_->read_gbps);
      const char* separator = "";
      for (const ArithmeticRate& rate : ceilings_->rates) {
        line += fmt::format("{} {:.0f} ({} {})", separator, rate.gflops, rate.isa, rate.arithmetic);
        separator = ",";
      }
      line += " GFLOP/s";
    }
    machine_lines_.push_back(line);
  }

  // The header waits for the first shape: after that, log lines would break up the table.
  void print_shape(const NamedShape& shape, const BenchLayers& layers) {
    if (header_written_) return;
    header_written_ = true;
    std::vector<std::string> lines = {machine_lines_.front()};
    lines.push_back(fmt::format("{}: {}, {} layer{}, {} of weights; routing {}", shape.name,
                                shape_text(shape.spec), layers.size(),
                                layers.size() == 1 ? "" : "s", bytes_text(layers.weight_bytes()),
                                options_.routing));
    if (!team_.alone()) {
      lines.push_back("ranks: " + team_.describe() + "; tokens are those of an EP rank");
    }
    if (const AdapterLoad& adapters = measure_.adapters; adapters.rank > 0) {
      lines.push_back(describe(adapters));
    }
    if (layers.weight_bytes() < kReuseDistanceBytes) {
      lines.push_back("the weights are small: caches may serve part of the reads");
    }
    nlohmann::ordered_json facts = nlohmann::ordered_json::object();
    add_facts(team_, facts);
    table_.header(facts, lines);
  }

  std::vector<Cell> cells(const NamedShape& shape, const Plan& plan, int32_t threads,
                          int64_t tokens, const Measurement& result) const {
    const Timing& timing = result.timing;
    const double gflops = result.flops / timing.mean_ms * 1e-6;
    const double gbps = result.weight_bytes / timing.mean_ms * 1e-6;
    Cell fma_share = absent_cell();
    Cell read_share = absent_cell();
    Cell floor = absent_cell();
    Cell floor_share = absent_cell();
    if (ceilings_) {
      const double best = ceilings_->best_gflops(plan.arithmetic);
      const double floor_ms =
          std::max(result.weight_bytes / ceilings_->read_gbps, result.flops / best) * 1e-6;
      fma_share = share_cell(gflops / best);
      read_share = share_cell(gbps / ceilings_->read_gbps);
      floor = ms_cell(floor_ms);
      floor_share = share_cell(floor_ms / timing.mean_ms);
    }
    std::vector<Cell> all = {
        text_cell(shape.name),
        integer_cell(tokens),
        integer_cell(threads),
        text_cell(plan.isa),
        text_cell(plan.arithmetic),
        text_cell(std::string(to_string(shape.spec.weight_dtype))),
        text_cell(options_.routing),
        {nullptr, fmt::format("{} ± {}", ms_text(timing.mean_ms), ms_text(timing.std_ms))},
        ms_cell(timing.mean_ms),
        ms_cell(timing.std_ms),
        ms_cell(timing.min_ms),
        ms_cell(timing.median_ms),
        fixed_cell(result.experts_hit, 1),
        fixed_cell(static_cast<double>(tokens * team_.ep_size()) / timing.mean_ms * 1e3, 1),
        fixed_cell(gflops, 1),
        fma_share,
        fixed_cell(gbps, 2),
        read_share,
        floor,
        floor_share,
        ceilings_ ? fixed_cell(ceilings_->read_gbps, 2) : absent_cell(),
        ceilings_ ? fixed_cell(ceilings_->best_gflops(plan.arithmetic), 1) : absent_cell(),
        integer_cell(options_.measure.repetitions),
        integer_cell(result.calls),
        text_cell(build_info().commit),
        text_cell(cpu_info().brand)};
    if (measure_.adapters.rank == 0) return all;
    const Timing& with = result.with_adapters;
    const std::vector<Cell> of_adapters = {
        integer_cell(measure_.adapters.rank),
        integer_cell(measure_.adapters.count),
        text_cell(adapted_tokens(measure_.adapters)),
        {nullptr, fmt::format("{} ± {}", ms_text(with.mean_ms), ms_text(with.std_ms))},
        ms_cell(with.mean_ms),
        ms_cell(with.median_ms),
        ms_cell(with.min_ms),
        fixed_cell(result.adapter_ratio, 3)};
    all.insert(all.end(), of_adapters.begin(), of_adapters.end());
    return all;
  }

  const BenchOptions& options_;
  const RankTeam& team_;
  const OutputFormat format_;
  MeasureOptions measure_;
  const std::vector<NamedShape> shapes_;
  const std::vector<int64_t> tokens_;
  const std::vector<int64_t> threads_;
  const std::vector<std::string> isas_;
  Console console_;
  TableWriter table_;
  std::optional<Ceilings> ceilings_;
  std::vector<std::string> machine_lines_;  // one per thread count and instruction set
  bool header_written_ = false;
};

}  // namespace

void add_bench_command(CommandLine& line) {
  Command command = line.add_command(
      "bench", "Measure random real-size layers in memory against this machine's own ceilings");
  auto options = std::make_shared<BenchOptions>();
  add_model_option(command, options->shape, " (default: qwen3-30b-a3b)");
  add_shape_options(command, options->shape, TypesOf::kAnyFile);
  add_rows_option(command, options->shape.rows);
  command.text("-T,--tokens", "LIST", options->tokens, "Token counts, such as 1,2,4 or 1-1024*4")
      .with_default();
  command.text(
      "-t,--threads", "LIST", options->threads,
      "Thread counts (default: CONCLAVE_NUM_THREADS, OMP_NUM_THREADS, or all usable CPUs)");
  command.text(
      "--isa", "LIST", options->isas,
      "Instruction sets: scalar, avx2, avx512, avx512_vnni, avx512_bf16, amx (default: best)");
  add_layer_options(command, options->machine);
  add_rank_options(command, options->ranks);
  command
      .text("--routing", "RULE", options->routing,
            "uniform, zipf:X, one (all tokens on the same k experts), or gate")
      .with_default();
  command
      .number("-r,--repetitions", "N", options->measure.repetitions, {1, 1000},
              "Timed repetitions; each makes as many calls as take a quarter second")
      .with_default();
  command
      .number("--warmup", "N", options->measure.warmup, {0, 1000},
              "Untimed repetitions before them")
      .with_default();
  command.number("--adapter-rank", "R", options->measure.adapters.rank, {0, kMostAdapterRank},
                 "Time every repetition with LoRA adapters of this rank too");
  command
      .number("--adapters", "N", options->measure.adapters.count, {1, 1024},
              "Adapters of each layer, which tokens take in turn")
      .with_default();
  command.seed(options->measure.seed, "Seed of weights, inputs and routings");
  command.flag("--no-ceilings", options->no_ceilings,
               "Do not measure read bandwidth and multiply-add rate");
  command.flag("--tune", options->tune,
               "On a GPU: find the fastest kernels and write them to --out");
  command
      .number("--budget", "SECONDS", options->tuning.budget_seconds, {1, 1 << 20},
              "Time for --tune; a later run goes on")
      .with_default();
  command.text("--out", kFileValue, options->tuning.out, "Tuning table to write or complete")
      .with_default();
  add_format_option(command, options->printing);
  add_progress_option(command, options->printing);
  command.footer(
      "Each call hits the next experts of a ring over all of them, so that at least 1 GiB of "
      "weights\n"
      "is read before the same are read again; small shapes get several layers. floor ms is the "
      "time\n"
      "that reading the weights hit, or multiplying, takes at the ceilings measured in this "
      "run.\n\n"
      "Examples:\n"
      "  conclave bench --model qwen3-30b-a3b --tokens 1,1024\n"
      "  conclave bench --model mixtral-8x7b,olmoe --tokens 1-256*4 --threads 1,2 --format md\n"
      "  conclave bench -E 128 -k 8 -H 2048 -I 768 --isa avx2,avx512 --format jsonl\n"
      "  conclave bench --model qwen3-30b-a3b --tokens 1-64*4 --adapter-rank 16\n"
      "  conclave bench --model olmoe --ranks 4 --transport mpi --tokens 1024\n"
      "  conclave bench --device cuda:0 --model olmoe --tokens 1,16,1024\n"
      "  conclave bench --model olmoe --ranks 4 --transport nccl --tokens 1024\n"
      "  conclave bench --device cuda:0 --tune --budget 60 --out tuning.txt");
  command.on_run([options] {
    return run_on_ranks(options->ranks,
                        [&](const RankTeam& team) { return BenchCommand(*options, team).run(); });
  });
}

}  // namespace conclave::tool
