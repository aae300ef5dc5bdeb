#include "cpu/ceilings/probes.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"

#include "conclave/device.h"
#include "conclave/error.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>

namespace conclave::inline v0 {
namespace {

using cpu::Isa;
using cpu::ceilings::RateLoop;
using cpu::ceilings::RateProbe;
using cpu::ceilings::ReadFunction;
using cpu::ceilings::ReadFunctions;

// Large enough that handing out work costs nothing, small enough that threads finish together.
constexpr int64_t kChunkBytes = int64_t{2} << 20;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double timed_read(Executor& executor, std::span<const std::byte> block, ReadFunction read) {
  std::atomic<uint64_t> sink{0};
  const auto start = std::chrono::steady_clock::now();
  cpu::parallel_for(executor, static_cast<int64_t>(block.size()), kChunkBytes,
                    [&](int64_t begin, int64_t end, int32_t /*worker*/) {
                      const uint64_t sum =
                          read(block.data() + begin, static_cast<size_t>(end - begin));
                      sink.fetch_xor(sum, std::memory_order_relaxed);
                    });
  return seconds_since(start);
}

double best_read_gbps(Executor& executor, Isa isa, const CeilingOptions& options) {
  const size_t bytes = static_cast<size_t>(options.read_bytes) & ~(cpu::ceilings::kReadGranule - 1);
  // This uses the library's own allocator, not the context's: huge pages are part of the ceiling.
  const cpu::Buffer block(cpu::default_allocator(), bytes);
  // Every page is touched to get memory of its own: untouched ones would share one page of zeros.
  cpu::parallel_for(executor, static_cast<int64_t>(bytes), kChunkBytes,
                    [&](int64_t begin, int64_t end, int32_t /*worker*/) {
                      std::memset(block.data() + begin, 1, static_cast<size_t>(end - begin));
                    });
  const ReadFunctions& reads = cpu::ceilings::read_functions_for(isa);
  const std::array variants = {reads.one_stream, reads.one_stream_prefetch, reads.two_streams,
                               reads.four_streams, reads.four_streams_prefetch};
  double best = 0;
  for (int32_t repetition = 0; repetition < options.repetitions; ++repetition) {
    for (const ReadFunction read : variants) {
      const double seconds = timed_read(executor, block.span(), read);
      best = std::max(best, static_cast<double>(bytes) / seconds / 1e9);
    }
  }
  return best;
}

// Runs on all workers at once; returns the seconds for `iterations` on each.
double timed_rate(Executor& executor, const RateLoop& loop, int64_t iterations) {
  struct State {
    const RateLoop* loop;
    int64_t iterations;
    std::atomic<float> sink{0};
  } state{&loop, iterations};
  const auto start = std::chrono::steady_clock::now();
  executor.run({.invoke =
                    [](void* opaque, int32_t /*worker*/) noexcept {
                      auto& work = *static_cast<State*>(opaque);
                      work.sink.store(work.loop->run(work.iterations), std::memory_order_relaxed);
                    },
                .state = &state});
  return seconds_since(start);
}

double best_gflops_of(Executor& executor, const RateLoop& loop, double seconds) {
  constexpr int kRuns = 5;
  const double run_seconds = std::max(seconds, 1e-3) / kRuns;
  // Doubling also brings the cores to their working frequency.
  int64_t iterations = 1024;
  while (timed_rate(executor, loop, iterations) < run_seconds / 2) iterations *= 2;
  double fastest = timed_rate(executor, loop, iterations);
  for (int run = 1; run < kRuns; ++run) {
    fastest = std::min(fastest, timed_rate(executor, loop, iterations));
  }
  const double flops = static_cast<double>(loop.flops_per_iteration) *
                       static_cast<double>(iterations) * executor.concurrency();
  return flops / fastest / 1e9;
}

void check(const CeilingOptions& options) {
  if (options.read_bytes < kChunkBytes) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "CeilingOptions::read_bytes is too small",
                                              .found = std::to_string(options.read_bytes),
                                              .limit = "at least " + std::to_string(kChunkBytes)});
  }
  if (options.repetitions < 1) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "CeilingOptions::repetitions is too small",
                                              .found = std::to_string(options.repetitions),
                                              .limit = "at least 1"});
  }
}

}  // namespace

Ceilings measure_ceilings(const Context& context, const CeilingOptions& options) {
  check(options);
  const Isa allowed = context.isa().empty() ? cpu::best_isa() : cpu::parse_isa(context.isa());
  Executor& executor = context.executor();
  Ceilings ceilings;
  ceilings.read_gbps = best_read_gbps(executor, allowed, options);
  for (const RateProbe& probe : cpu::ceilings::rate_probes()) {
    if (probe.isa > allowed || !cpu::usable(probe.isa)) continue;
    if (probe.also_needs != nullptr && !probe.also_needs()) continue;
    ceilings.rates.push_back(
        {.isa = std::string(cpu::to_string(probe.isa)),
         .arithmetic = std::string(cpu::to_string(probe.arithmetic)),
         .gflops = best_gflops_of(executor, *probe.loop, options.seconds_per_rate),
         .of_codes = cpu::multiplies_integers(probe.arithmetic)});
  }
  return ceilings;
}

double Ceilings::best_gflops() const noexcept { return best_gflops(std::string_view()); }

double Ceilings::best_gflops(std::string_view arithmetic) const noexcept {
  const bool of_codes = std::ranges::any_of(rates, [&](const ArithmeticRate& rate) {
    return rate.of_codes && rate.arithmetic == arithmetic;
  });
  double best = 0;
  for (const ArithmeticRate& rate : rates) {
    if (rate.of_codes == of_codes) best = std::max(best, rate.gflops);
  }
  return best;
}

}  // namespace conclave::inline v0
