// Times whole layers on the GPU through the public interface, from ids and weights or from logits
// to the output. Prints JSON lines for report.py; every output is checked.
#include "ceilings.h"
#include "cuda/device_info.h"
#include "layer_subject.h"
#include "options.h"
#include "routing_bench.h"
#include "support/cuda/cases.h"

#include "conclave/version.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <string>

namespace {

using namespace conclave;
using namespace conclave::bench;
using testing::CudaProblem;
using testing::LayerCase;
using testing::RoutingKind;

// For bf16 and quantised formats: docs/numerics.md.
constexpr double kTolerance = 6e-3;
constexpr int64_t kShardFromTokens = 256;
constexpr int64_t kWarmUpTokens = 1024;
constexpr int64_t kRoutingToTokens = 256;
constexpr int32_t kRoutingReplays = 20;

struct Variant {
  const char* name;
  Determinism determinism;
  RoutingInput input;
  RoutingKind routing;
};
constexpr Variant kVariants[] = {
    {"d1", Determinism::kRepeatable, RoutingInput::kIds, RoutingKind::kUniform},
    {"d2", Determinism::kBatchInvariant, RoutingInput::kIds, RoutingKind::kUniform},
    {"unordered", Determinism::kUnordered, RoutingInput::kIds, RoutingKind::kUniform},
    {"logits", Determinism::kRepeatable, RoutingInput::kLogits, RoutingKind::kUniform},
    {"zipf", Determinism::kRepeatable, RoutingInput::kIds, RoutingKind::kZipf},
    {"onehot", Determinism::kRepeatable, RoutingInput::kIds, RoutingKind::kOneHot},
};

bool wants(const Options& options, const std::string& variant) {
  return std::find(options.variants.begin(), options.variants.end(), variant) !=
         options.variants.end();
}

std::string kernel_of(const Plan& plan, int64_t tokens) {
  for (const PlanRung& rung : plan.ladder) {
    if (tokens >= rung.first_tokens && tokens <= rung.last_tokens) {
      return rung.kernel + " " + rung.tile;
    }
  }
  return "unknown";
}

// The decode and reference kernels sum in float32; the others use tensor cores.
double ambiguity_of(const std::string& kernel) {
  const bool on_tensor_cores =
      !kernel.starts_with("cuda.decode") && !kernel.starts_with("cuda.reference");
  return on_tensor_cores ? testing::kTensorCoreAmbiguity : testing::kFloat32Ambiguity;
}

double mean_active_bytes(const CudaProblem& problem) {
  double sum = 0;
  for (int32_t i = 0; i < problem.options().routings; ++i) {
    sum += static_cast<double>(problem.active_weight_bytes(i));
  }
  return sum / problem.options().routings;
}

class CaseBench {
 public:
  CaseBench(const Context& context, const LayerCase& c, const Options& options)
      : context_(context), case_(c), options_(options), problem_(problem_options(c)) {}

  // Returns false if an output was wrong.
  bool run() {
    bool good = true;
    warm_up(kWarmUpTokens);
    for (const int64_t tokens : options_.tokens) {
      if (case_.is_shard && tokens < kShardFromTokens) continue;
      warm_up(tokens);
      for (const Variant& variant : kVariants) {
        if (wants(options_, variant.name)) good &= run_cell(variant, tokens);
      }
      if (wants(options_, "routing") && tokens <= kRoutingToTokens) good &= run_routing(tokens);
    }
    if (options_.print_plans) {
      for (const auto& [determinism, subject] : subjects_) {
        std::fprintf(stderr, "%s\n%s\n", case_.name.c_str(), explain(subject->plan()).c_str());
      }
    }
    return good;
  }

 private:
  LayerSubject& subject(Determinism determinism) {
    auto& entry = subjects_[determinism];
    if (!entry) {
      const int64_t most = *std::max_element(options_.tokens.begin(), options_.tokens.end());
      entry = std::make_unique<LayerSubject>(context_, problem_, std::max<int64_t>(most, 16384),
                                             determinism);
    }
    return *entry;
  }

  // The chip rests while weights or a batch are made, and its clock first overshoots, then falls
  // too far: without this the first cell measured up to 10 % slower than the same kernels after it.
  void warm_up(int64_t tokens) {
    set_batch(RoutingKind::kUniform, tokens);
    subject(Determinism::kRepeatable).measure(RoutingInput::kIds, options_.seconds_per_cell);
  }

  void set_batch(RoutingKind routing, int64_t tokens) {
    problem_.set_batch({.num_tokens = tokens,
                        .routing = routing,
                        .routings = testing::routings_per_graph(tokens),
                        .seed = static_cast<uint64_t>(tokens) + 1});
  }

  bool run_cell(const Variant& variant, int64_t tokens) {
    set_batch(variant.routing, tokens);
    try {
      LayerSubject& layer = subject(variant.determinism);
      const std::string kernel = kernel_of(layer.plan(), tokens);
      problem_.set_ambiguity(ambiguity_of(kernel));
      const Measurement m = layer.measure(variant.input, options_.seconds_per_cell);
      print(variant, tokens, kernel, m);
      return m.damage == 0 && within(m.errors, kTolerance);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
      std::printf("{\"case\": \"%s\", \"variant\": \"%s\", \"tokens\": %lld, \"refused\": true}\n",
                  case_.name.c_str(), variant.name, static_cast<long long>(tokens));
      std::fprintf(stderr, "%s %s: %s\n", case_.name.c_str(), variant.name, error.what());
      return true;
    }
  }

  bool run_routing(int64_t tokens) {
    problem_.set_batch({.num_tokens = tokens, .routings = testing::routings_per_graph(tokens)});
    const RoutingMeasurement m = measure_routing(case_.name, problem_.options(), kRoutingReplays);
    std::printf(
        "{\"case\": \"%s\", \"variant\": \"routing\", \"tokens\": %lld, "
        "\"us\": %.2f, \"right\": %s}\n",
        case_.name.c_str(), static_cast<long long>(tokens), m.microseconds,
        m.is_right ? "true" : "false");
    return m.is_right;
  }

  void print(const Variant& variant, int64_t tokens, const std::string& kernel,
             const Measurement& m) const {
    std::printf(
        "{\"case\": \"%s\", \"format\": \"%s\", \"variant\": \"%s\", \"tokens\": %lld, "
        "\"us\": %.2f, \"active_experts\": %lld, \"active_bytes\": %.0f, \"flops\": %.0f, "
        "\"routings\": %d, \"replays\": %d, \"worst_error\": %.3e, \"p999_error\": %.3e, "
        "\"checked\": %lld, \"stray\": %lld, \"damage\": %lld, \"kernel\": \"%s\"}\n",
        case_.name.c_str(), case_.format.c_str(), variant.name, static_cast<long long>(tokens),
        m.microseconds, static_cast<long long>(problem_.active_experts()),
        mean_active_bytes(problem_), problem_.flops(), m.routings, m.replays,
        std::min(m.errors.worst, 1e9), std::min(m.errors.p999, 1e9),
        static_cast<long long>(m.errors.checked), static_cast<long long>(m.errors.stray),
        static_cast<long long>(m.damage), kernel.c_str());
    std::fflush(stdout);
  }

  const Context& context_;
  const LayerCase& case_;
  const Options& options_;
  CudaProblem problem_;
  std::map<Determinism, std::unique_ptr<LayerSubject>> subjects_;
};

int run(const Options& options) {
  const cuda::DeviceInfo device = cuda::device_info(0);
  std::printf("{\"device\": \"%s\", \"multiprocessors\": %d, \"read_tbps\": %.3f}\n",
              device.name.c_str(), device.multiprocessors, read_stream_tbps());
  const Context context({.device = "cuda:0"});
  bool good = true;
  for (const std::string& name : options.cases) {
    good &= CaseBench(context, testing::find_case(name), options).run();
  }
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse_options(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "layer_bench: %s\n", error.what());
    return 2;
  }
}
