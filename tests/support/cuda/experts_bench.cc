#include "support/cuda/experts_bench.h"

#include "cuda/check.h"
#include "dispatch/cuda/spread_rows.h"
#include "support/cuda/cases.h"
#include "support/cuda/cuda_problem.h"
#include "support/cuda/graph_timer.h"
#include "support/cuda/guarded_device.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::testing {

namespace {

constexpr double kTolerance = 6e-3;
constexpr double kReadBytesPerMicrosecond = 4.8e6;
constexpr double kBf16FlopsPerMicrosecond = 989e6;

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    parts.emplace_back(text.substr(0, comma));
    text.remove_prefix(comma == std::string_view::npos ? text.size() : comma + 1);
  }
  return parts;
}

class Arguments {
 public:
  Arguments(int argc, char** argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
      const std::string_view name = argv[i];
      if (name.substr(0, 2) != "--")
        throw std::runtime_error("not an option: " + std::string(name));
      values_[std::string(name.substr(2))] = argv[i + 1];
    }
  }
  std::string get(const std::string& name, const std::string& fallback) const {
    const auto found = values_.find(name);
    return found == values_.end() ? fallback : found->second;
  }
  int number(const std::string& name, int fallback) const {
    return std::stoi(get(name, std::to_string(fallback)));
  }

 private:
  std::map<std::string, std::string> values_;
};

LayerCase case_of(const std::string& name, const Arguments& arguments) {
  const std::vector<std::string> custom = split(arguments.get("custom", ""));
  if (custom.size() != 5) return find_case(name);
  return {.name = "custom",
          .experts = std::stoll(custom[0]),
          .top_k = std::stoll(custom[1]),
          .hidden = std::stoll(custom[2]),
          .intermediate = std::stoll(custom[3]),
          .format = custom[4]};
}

RoutingKind routing_kind(const std::string& name) {
  if (name == "zipf") return RoutingKind::kZipf;
  if (name == "onehot") return RoutingKind::kOneHot;
  if (name == "holes") return RoutingKind::kHoles;
  return RoutingKind::kUniform;
}

CudaProblemOptions options_of(const LayerCase& c, int64_t tokens, const Arguments& arguments) {
  CudaProblemOptions o = problem_options(c);
  o.num_tokens = tokens;
  o.routing = routing_kind(arguments.get("routing", "uniform"));
  o.routings = routings_per_graph(tokens);
  o.activation.name = arguments.get("activation", o.activation.name);
  return o;
}

struct Outcome {
  RowErrors errors;
  int64_t damage = 0;
  double microseconds = 0;
};

class Subject {
 public:
  Subject(CudaProblem& problem, const experts::DeviceKernelRow& row,
          const experts::DeviceTile& tile)
      : problem_(problem),
        tile_(tile),
        kernel_(row.make(problem.sizes(), problem.weights(), tile)),
        workspace_(row.workspace_bytes(problem.sizes(), problem.options().num_tokens)),
        output_(static_cast<size_t>(problem.output_bytes())) {
    for (int32_t i = 0; i < problem_.options().routings; ++i) {
      problem_.groups(kernel_->tile_tokens(), i);
      if (tile_.sorted_input && is_quantised()) {
        sorted_codes_.push_back(problem_.sorted_input(kernel_->tile_tokens(), i, nullptr));
      }
    }
  }

  Outcome measure(const Arguments& arguments) {
    Outcome outcome;
    if (arguments.number("time", 1) != 0) {
      const GraphTiming timing{.inputs = problem_.options().routings,
                               .replays = arguments.number("replays", 5)};
      outcome.microseconds =
          time_graph(timing, [&](int32_t input, CUstream_st* stream) { enqueue(input, stream); });
    }
    if (arguments.number("check", 1) == 0) return outcome;
    workspace_.poison(nullptr);
    output_.poison(nullptr);
    enqueue(0, nullptr);
    outcome.damage = workspace_.damage() + output_.damage();
    outcome.errors = problem_.check_rows(output_.data());
    return outcome;
  }

  std::string describe() const { return kernel_->describe(); }

 private:
  void enqueue(int32_t routing, CUstream_st* stream) {
    experts::DeviceExpertsCall call =
        problem_.call(kernel_->tile_tokens(), routing, workspace_.data(), output_.data());
    if (tile_.sorted_input) call.input = sorted_input(call, routing, stream);
    kernel_->run(call, stream);
  }

  bool is_quantised() const { return problem_.input().dtype == DType::kF8E4M3; }

  // Works as in a layer: 16-bit rows are copied to where the results will lie. Codes are sorted by
  // the kernel that makes them, which is not timed here.
  DeviceRows sorted_input(const experts::DeviceExpertsCall& call, int32_t routing,
                          CUstream_st* stream) {
    if (is_quantised()) return sorted_codes_[static_cast<size_t>(routing)];
    DeviceRows rows = call.input;
    dispatch::spread_rows({.rows = rows.data,
                           .dtype = rows.dtype,
                           .row_stride = rows.row_stride,
                           .num_rows = rows.num_rows,
                           .columns = problem_.options().hidden_size,
                           .slot_row = call.groups.slot_row,
                           .top_k = call.groups.top_k,
                           .out = call.output,
                           .out_dtype = rows.dtype,
                           .out_stride = call.output_stride},
                          stream);
    rows.data = call.output;
    rows.num_rows = call.groups.max_rows;
    rows.row_stride = call.output_stride;
    return rows;
  }

  CudaProblem& problem_;
  experts::DeviceTile tile_;
  std::unique_ptr<experts::DeviceExpertsKernel> kernel_;
  GuardedDevice workspace_;
  GuardedDevice output_;
  std::vector<DeviceRows> sorted_codes_;
};

double mean_active_bytes(const CudaProblem& problem) {
  double sum = 0;
  for (int32_t i = 0; i < problem.options().routings; ++i) {
    sum += static_cast<double>(problem.active_weight_bytes(i));
  }
  return sum / problem.options().routings;
}

// Returns whether the check passed.
bool print_outcome(const CudaProblem& problem, const std::string& kernel, const Outcome& outcome) {
  const double bytes = mean_active_bytes(problem);
  const double flops = problem.flops();
  const bool fp8_math = problem.input().dtype == DType::kF8E4M3;
  const double floor = std::max(bytes / kReadBytesPerMicrosecond,
                                flops / (kBf16FlopsPerMicrosecond * (fp8_math ? 2 : 1)));
  const double us = std::max(outcome.microseconds, 1e-3);
  const bool good = outcome.damage == 0 && within(outcome.errors, kTolerance);
  std::printf("  %-58s %9.1f us %5.2f TB/s %6.1f TFLOP/s floor %8.1f share %4.2f | %s%s\n",
              kernel.c_str(), outcome.microseconds, bytes / us * 1e-6, flops / us * 1e-6, floor,
              floor / us, outcome.errors.describe().c_str(), good ? "" : " FAILED");
  if (outcome.damage != 0) {
    std::printf("    canary damage: %lld bytes\n", static_cast<long long>(outcome.damage));
  }
  std::fflush(stdout);
  return good;
}

std::vector<experts::DeviceTile> chosen_tiles(std::span<const experts::DeviceTile> tiles,
                                              const std::string& which) {
  if (which == "all") return {tiles.begin(), tiles.end()};
  std::vector<experts::DeviceTile> chosen;
  for (const std::string& index : split(which)) {
    if (std::stoul(index) < tiles.size()) chosen.push_back(tiles[std::stoul(index)]);
  }
  return chosen;
}

bool run_row(CudaProblem& problem, const experts::DeviceKernelRow& row,
             const Arguments& arguments) {
  if (const Support support = row.supports(problem.sizes()); !support) {
    std::printf("  %s: %s\n", std::string(row.name).c_str(), std::string(support.reason()).c_str());
    return true;
  }
  problem.set_ambiguity(row.is_reference ? kFloat32Ambiguity : kTensorCoreAmbiguity);
  bool good = true;
  for (const experts::DeviceTile& tile :
       chosen_tiles(row.tiles(problem.sizes()), arguments.get("tile", "0"))) {
    Subject subject(problem, row, tile);
    good &= print_outcome(problem, subject.describe(), subject.measure(arguments));
  }
  return good;
}

int run(std::span<const experts::DeviceKernelRow> rows, const Arguments& arguments) {
  bool good = true;
  const std::vector<std::string> names = split(arguments.get("row", ""));
  for (const std::string& name : split(arguments.get("case", "tiny"))) {
    const LayerCase c = case_of(name, arguments);
    const std::vector<std::string> counts = split(arguments.get("T", "16"));
    CudaProblem problem(options_of(c, std::stoll(counts.at(0)), arguments));
    for (const std::string& tokens : counts) {
      const CudaProblemOptions o = options_of(c, std::stoll(tokens), arguments);
      problem.set_batch({.num_tokens = o.num_tokens, .routing = o.routing, .routings = o.routings});
      std::printf("%s T=%s E=%lld k=%lld H=%lld I=%lld %s, %lld experts active\n", c.name.c_str(),
                  tokens.c_str(), static_cast<long long>(c.experts),
                  static_cast<long long>(c.top_k), static_cast<long long>(c.hidden),
                  static_cast<long long>(c.intermediate), c.format.c_str(),
                  static_cast<long long>(problem.active_experts()));
      for (const experts::DeviceKernelRow& row : rows) {
        if (!names.empty() && std::find(names.begin(), names.end(), row.name) == names.end()) {
          continue;
        }
        good &= run_row(problem, row, arguments);
      }
    }
  }
  return good ? 0 : 1;
}

}  // namespace

int run_experts_bench(std::span<const experts::DeviceKernelRow> rows, int argc, char** argv) {
  try {
    return run(rows, Arguments(argc, argv));
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
}

}  // namespace conclave::testing
