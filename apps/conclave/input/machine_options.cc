#include "input/machine_options.h"

#include "output/numbers.h"

#include "conclave/device.h"
#include "conclave/error.h"
#include "conclave/tuning.h"
#include "conclave/version.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

namespace conclave::tool {
namespace {

struct DeterminismName {
  const char* name;
  Determinism value;
};
constexpr DeterminismName kDeterminisms[] = {{"repeatable", Determinism::kRepeatable},
                                             {"batch-invariant", Determinism::kBatchInvariant},
                                             {"unordered", Determinism::kUnordered}};

std::vector<std::string> determinism_names() {
  std::vector<std::string> names;
  for (const DeterminismName& known : kDeterminisms) names.emplace_back(known.name);
  return names;
}

Determinism parse_determinism(std::string_view name) {
  for (const DeterminismName& known : kDeterminisms) {
    if (name == known.name) return known.value;
  }
  return Determinism::kRepeatable;  // the command line has refused all others
}

constexpr const char* kInPlace = "in-place";

}  // namespace

void add_threads_option(Command& command, MachineOptions& options) {
  command.number("-t,--threads", "N", options.threads, {1, 4096},
                 "Threads (default: CONCLAVE_NUM_THREADS, OMP_NUM_THREADS, or all usable CPUs)");
}

void add_machine_options(Command& command, MachineOptions& options) {
  add_threads_option(command, options);
  command.text("--isa", "NAME", options.isa,
               "Force an instruction set: scalar, avx2, avx512, avx512_vnni, avx512_bf16 or amx");
  add_layer_options(command, options);
}

void add_layer_options(Command& command, MachineOptions& options) {
  command.text("--device", "NAME", options.device,
               "Where layers run: cpu or cuda:N (default: CONCLAVE_DEVICE, or cpu)");
  command.text("--tuning", kFileValue, options.tuning,
               "Table of measured kernel choices for a GPU (see bench --tune)");
  command.choice("--determinism", options.determinism, determinism_names(),
                 "Which results on a GPU have the same bits; unordered: may add in any order");
  command.text(
      "--arithmetic", "NAME", options.arithmetic,
      "Force an arithmetic: f32_fma, dpbf16, amx_bf16 or int8_dot (default: by the CPU table)");
  command.text("--kernel", "NAME", options.kernel, "Force a row of the kernel table (see explain)");
  command.flag("--pin-threads", options.pin_threads, "Bind each thread to one CPU");
}

void add_weights_option(Command& command, MachineOptions& options) {
  command.choice(
      "--weights", options.weights, {"packed", kInPlace},
      "Copy experts into panels, or read those of f32, f16 and bf16 in the mapped files, "
      "which nobody may write meanwhile (on the CPU)");
}

FileAccess file_access(const MachineOptions& options) {
  return options.weights == kInPlace ? FileAccess::kMap : FileAccess::kAuto;
}

Context make_context(const MachineOptions& options, LogSink* log) {
  return make_context(options, log, RankTeam());
}

// Ranks with a GPU each have no device in common.
static std::string device_of(const MachineOptions& options, const RankTeam& team) {
  const std::string& given = options.device;
  const std::string kind = team.device().substr(0, team.device().find(':'));
  if (kind.empty() || (team.alone() && given.starts_with(kind))) return given;
  if (given.empty() || given == kind) return team.device();
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "the ranks of this transport have a GPU each",
               .tensor = "--device",
               .expected = kind + ", or none",
               .found = given,
               .hint = "CUDA_VISIBLE_DEVICES says which GPUs they share out"});
}

Context make_context(const MachineOptions& options, LogSink* log, const RankTeam& team) {
  ContextOptions context{.device = device_of(options, team),
                         .num_threads = options.threads,
                         .pin_threads = options.pin_threads,
                         .isa = options.isa,
                         .log = log};
  team.connect(context);
  if (options.threads == 0 && team.ranks_here() > 1) {
    const int32_t all = Context::from_environment(context).executor().concurrency();
    context.num_threads = std::max(all / team.ranks_here(), 1);
  }
  return Context::from_environment(std::move(context));
}

LayerOptions layer_options(const MachineOptions& options, int64_t max_tokens) {
  LayerOptions layer;
  layer.max_tokens = max_tokens;
  layer.kernel = options.kernel;
  layer.arithmetic = options.arithmetic;
  layer.determinism = parse_determinism(options.determinism);
  layer.weights = options.weights == kInPlace ? WeightUse::kInPlace : WeightUse::kPacked;
  if (!options.tuning.empty()) {
    layer.tuning = std::make_shared<TuningTable>(TuningTable::load(options.tuning));
  }
  return layer;
}

std::string compute_text(const Plan& plan) {
  if (plan.isa.empty()) return fmt::format("{}, {}", plan.device, plan.arithmetic);
  return fmt::format("{} {}", plan.isa, plan.arithmetic);
}

std::string machine_line(const Context& context) {
  const int32_t threads = context.executor().concurrency();
  return fmt::format("conclave {} ({}): {}, {} thread{}", build_info().version, build_info().commit,
                     cpu_info().brand, threads, threads == 1 ? "" : "s");
}

nlohmann::ordered_json machine_facts(const Context& context) {
  return {{"version", build_info().version},
          {"commit", build_info().commit},
          {"cpu", cpu_info().brand},
          {"threads", context.executor().concurrency()}};
}

void add_format_option(Command& command, OutputOptions& options) {
  command.choice("-f,--format", options.format, output_format_names(), "How to print the results");
}

void add_progress_option(Command& command, OutputOptions& options) {
  command.flag("--no-progress", options.no_progress,
               "No progress bars (there are none without a terminal)");
}

void require_memory(uint64_t bytes, std::string_view what, std::string_view hint) {
  const uint64_t memory = static_cast<uint64_t>(cpu_info().memory_bytes);
  if (memory == 0 || bytes <= memory) return;
  throw Error(ErrorCode::kOutOfMemory, {.what = fmt::format("too little memory for {}", what),
                                        .expected = bytes_text(bytes),
                                        .limit = bytes_text(memory) + " on this machine",
                                        .hint = std::string(hint)});
}

}  // namespace conclave::tool
