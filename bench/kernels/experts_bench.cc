// Times kernel rows of the experts on one layer of random weights, without router and combine. Each
// call reads other experts than the previous ones, so that weights come from memory.
#include "cpu/isa.h"
#include "cpu/memory.h"
#include "experts/catalog.h"
#include "experts/kernel.h"
#include "gemm/gate_product.h"

#include "conclave/context.h"
#include "conclave/device.h"
#include "conclave/tensor.h"

#include <CLI/CLI.hpp>
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <time.h>
#include <vector>

namespace {

using namespace conclave;

struct Options {
  int64_t num_experts = 128;
  int64_t top_k = 8;
  int64_t hidden_size = 2048;
  int64_t intermediate_size = 768;
  std::string dtype = "BF16";
  std::string kernel;
  std::vector<int64_t> tokens = {1, 4, 16, 64, 256, 1024};
  int32_t threads = 0;
  double seconds = 1.0;
  bool ceilings = true;
  bool cpu_time = false;
};

// Returns wall time, or the process's processor time per thread: if others load the machine, only
// the latter can be compared (with one thread, since waiting threads spin).
double now(const Options& options, const Executor& executor) {
  timespec time{};
  clock_gettime(options.cpu_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  const double seconds =
      static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  return options.cpu_time ? seconds / executor.concurrency() : seconds;
}

// Writes small normal-looking values in any of the float types, without conversion: sign and
// mantissa are random, the exponent is that of [2^-6, 2^-5).
void fill_weights(std::span<std::byte> bytes, DType dtype, uint64_t seed) {
  std::mt19937_64 random(seed);
  auto* words = static_cast<uint64_t*>(static_cast<void*>(bytes.data()));
  const uint64_t keep = dtype == DType::kF32    ? 0x807fffff807fffffULL
                        : dtype == DType::kBF16 ? 0x807f807f807f807fULL
                                                : 0x83ff83ff83ff83ffULL;
  const uint64_t set = dtype == DType::kF32    ? 0x3c8000003c800000ULL
                       : dtype == DType::kBF16 ? 0x3c803c803c803c80ULL
                                               : 0x2400240024002400ULL;
  uint64_t state = random();
  for (size_t i = 0; i < bytes.size() / sizeof(uint64_t); ++i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    words[i] = (state & keep) | set;
  }
}

// Chooses experts for `num_tokens` tokens. A few tokens are dealt from a shuffled deck, so that
// consecutive calls use disjoint experts; many tokens draw freely.
class Router {
 public:
  Router(int64_t num_experts, int64_t top_k) : deck_(static_cast<size_t>(num_experts)), k_(top_k) {
    std::iota(deck_.begin(), deck_.end(), int64_t{0});
    next_ = deck_.size();
  }

  std::vector<std::vector<int64_t>> rows_per_expert(int64_t num_tokens) {
    std::vector<std::vector<int64_t>> rows(deck_.size());
    for (int64_t token = 0; token < num_tokens; ++token) {
      if (next_ + static_cast<size_t>(k_) > deck_.size()) {
        if (num_tokens > 4 || next_ >= deck_.size())
          std::shuffle(deck_.begin(), deck_.end(), random_);
        next_ = 0;
      }
      for (int64_t i = 0; i < k_; ++i) rows[static_cast<size_t>(deck_[next_++])].push_back(token);
      if (num_tokens > 4) next_ = deck_.size();
    }
    return rows;
  }

 private:
  std::vector<int64_t> deck_;
  int64_t k_;
  size_t next_ = 0;
  std::mt19937_64 random_{7};
};

struct Batch {
  std::vector<int64_t> begin;
  std::vector<int64_t> count;
  std::vector<int64_t> source_row;
  int64_t active = 0;

  explicit Batch(const std::vector<std::vector<int64_t>>& rows) {
    for (const auto& expert : rows) {
      begin.push_back(static_cast<int64_t>(source_row.size()));
      count.push_back(static_cast<int64_t>(expert.size()));
      source_row.insert(source_row.end(), expert.begin(), expert.end());
      active += expert.empty() ? 0 : 1;
    }
  }
};

class Bench {
 public:
  Bench(const Options& options, const experts::HostKernelRow& row, Context& context)
      : options_(options),
        row_(row),
        context_(context),
        kernel_(row.make(problem(options, row))),
        bytes_(kernel_->slab_bytes()),
        gate_up_(context.host_allocator(),
                 bytes_.gate_up * static_cast<size_t>(options.num_experts)),
        down_(context.host_allocator(), bytes_.down * static_cast<size_t>(options.num_experts)) {
    fill_weights(gate_up_.span(), *parse_dtype(options.dtype), 1);
    fill_weights(down_.span(), *parse_dtype(options.dtype), 2);
  }

  static experts::ExpertsProblem problem(const Options& options,
                                         const experts::HostKernelRow& row) {
    return {.num_local_experts = options.num_experts,
            .hidden_size = options.hidden_size,
            .intermediate_size = options.intermediate_size,
            .weight_dtype = *parse_dtype(options.dtype),
            .target = experts::CpuTarget{.isa = cpu::best_isa(),
                                         .arithmetic = cpu::parse_arithmetic(row.arithmetic)}};
  }

  void run(int64_t num_tokens, const Ceilings& ceilings) {
    const auto needs = kernel_->requirements();
    const int64_t slots = num_tokens * options_.top_k;
    cpu::Buffer rows(context_.host_allocator(), static_cast<size_t>(num_tokens * needs.row_bytes));
    fill_weights(rows.span(), needs.row_dtype, 3);
    cpu::Buffer workspace(context_.host_allocator(),
                          kernel_->workspace_bytes(slots, context_.executor().concurrency()));
    cpu::Buffer out(context_.host_allocator(),
                    static_cast<size_t>(slots * options_.hidden_size) * sizeof(float));
    Router router(options_.num_experts, options_.top_k);

    std::vector<double> seconds;
    double total = 0.0;
    double bytes = 0.0;
    while (total < options_.seconds || seconds.size() < 5) {
      const Batch batch(router.rows_per_expert(num_tokens));
      const double start = now(options_, context_.executor());
      kernel_->run({.bundle = {rows.data(), num_tokens, needs.row_bytes, needs.row_dtype},
                    .num_local_experts = options_.num_experts,
                    .num_slots = slots,
                    .expert_begin = batch.begin.data(),
                    .expert_count = batch.count.data(),
                    .source_row = batch.source_row.data()},
                   {gate_up_.data(), down_.data()},
                   {.rows = static_cast<float*>(static_cast<void*>(out.data())),
                    .row_stride = options_.hidden_size},
                   workspace.span(), context_.executor());
      seconds.push_back(now(options_, context_.executor()) - start);
      total += seconds.back();
      bytes = static_cast<double>(batch.active) * static_cast<double>(bytes_.gate_up + bytes_.down);
    }
    std::sort(seconds.begin(), seconds.end());
    const double best = seconds.front();
    const double median = seconds[seconds.size() / 2];
    const double flop = 6.0 * static_cast<double>(slots * options_.hidden_size) *
                        static_cast<double>(options_.intermediate_size);
    fmt::print("{:16} {:>6} {:>10.3f} {:>10.3f} {:>9.1f} {:>8.2f} {:>7.1f}% {:>7.1f}%\n", row_.name,
               num_tokens, best * 1e3, median * 1e3, flop / best / 1e9, bytes / best / 1e9,
               100.0 * flop / best / 1e9 / ceilings.best_gflops(),
               100.0 * bytes / best / 1e9 / ceilings.read_gbps);
    std::fflush(stdout);
  }

 private:
  const Options& options_;
  const experts::HostKernelRow& row_;
  Context& context_;
  std::unique_ptr<experts::ExpertsKernel> kernel_;
  experts::SlabBytes bytes_;
  cpu::Buffer gate_up_;
  cpu::Buffer down_;
};

int run(const Options& options) {
  Context context({.num_threads = options.threads});
  Ceilings ceilings{.read_gbps = 1.0, .rates = {{"", "", 1.0}}};
  if (options.ceilings) {
    ceilings = measure_ceilings(context, {.repetitions = 3, .seconds_per_rate = 0.1});
    fmt::print("read {:.1f} GB/s", ceilings.read_gbps);
    for (const auto& rate : ceilings.rates) {
      fmt::print(", {} {} {:.0f} GFLOP/s", rate.isa, rate.arithmetic, rate.gflops);
    }
    fmt::print("\n");
  }
  fmt::print("{:16} {:>6} {:>10} {:>10} {:>9} {:>8} {:>8} {:>8}\n", "kernel", "tokens", "best ms",
             "median ms", "GFLOP/s", "GB/s", "of FMA", "of read");
  const auto catalog = experts::host_kernels();
  for (const auto& row : catalog.rows()) {
    if (options.kernel.empty() ? row.is_reference : row.name != options.kernel) continue;
    if (!row.supports(Bench::problem(options, row))) continue;
    Bench bench(options, row, context);
    for (const int64_t tokens : options.tokens) bench.run(tokens, ceilings);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Times the experts' kernel rows");
  app.add_option("--experts,-E", options.num_experts);
  app.add_option("--top-k,-k", options.top_k);
  app.add_option("--hidden,-H", options.hidden_size);
  app.add_option("--intermediate,-I", options.intermediate_size);
  app.add_option("--dtype", options.dtype)->check(CLI::IsMember({"F32", "F16", "BF16"}));
  app.add_option("--kernel", options.kernel,
                 "one row of the catalog; empty: all but the reference");
  app.add_option("--tokens,-T", options.tokens)->delimiter(',');
  app.add_option("--threads,-t", options.threads);
  app.add_option("--seconds", options.seconds, "per measurement");
  app.add_flag("--ceilings,!--no-ceilings", options.ceilings);
  app.add_flag("--cpu-time", options.cpu_time, "processor time instead of wall time");
  CLI11_PARSE(app, argc, argv);
  return run(options);
}
