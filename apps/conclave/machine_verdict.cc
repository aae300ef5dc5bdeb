#include "machine_verdict.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>

namespace conclave::tool {
namespace {

// To count as faster, another arithmetic must exceed the scatter of a measurement.
constexpr double kScatter = 1.10;
// Below this share, others had the CPUs often enough to decide which loop looks fast.
constexpr double kIdleShare = 0.95;
constexpr size_t kMostMeasurements = 3;

const ArithmeticRate* find_rate(const Ceilings& ceilings, const std::string& arithmetic) {
  const ArithmeticRate* best = nullptr;
  for (const ArithmeticRate& rate : ceilings.rates) {
    const bool better = best == nullptr || rate.gflops > best->gflops;
    if (rate.arithmetic == arithmetic && better) best = &rate;
  }
  return best;
}

// Rates of codes are no choice of the CPU table.
const ArithmeticRate* fastest_rate(const Ceilings& ceilings) {
  const ArithmeticRate* fastest = nullptr;
  for (const ArithmeticRate& rate : ceilings.rates) {
    const bool faster = fastest == nullptr || rate.gflops > fastest->gflops;
    if (!rate.of_codes && faster) fastest = &rate;
  }
  return fastest;
}

bool seems_wrong(const Ceilings& ceilings, const std::string& arithmetic) {
  const ArithmeticRate* chosen = find_rate(ceilings, arithmetic);
  return chosen != nullptr && fastest_rate(ceilings)->gflops > kScatter * chosen->gflops;
}

double process_cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

CeilingMeasurement measure_once(const Context& context, const CeilingOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  const double cpu_begin = process_cpu_seconds();
  CeilingMeasurement measurement{.ceilings = measure_ceilings(context, options)};
  const double cpu_seconds = process_cpu_seconds() - cpu_begin;
  const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
  // More threads than CPUs share the CPUs even if nobody else is at work.
  const int32_t running = std::min(context.executor().concurrency(), cpu_info().usable_cpus);
  measurement.cpu_share = std::min(1.0, cpu_seconds / (wall.count() * std::max(running, 1)));
  return measurement;
}

}  // namespace

Ceilings best_of(std::span<const CeilingMeasurement> measurements) {
  Ceilings best;
  for (const CeilingMeasurement& measurement : measurements) {
    best.read_gbps = std::max(best.read_gbps, measurement.ceilings.read_gbps);
    for (const ArithmeticRate& rate : measurement.ceilings.rates) {
      const auto same =
          std::find_if(best.rates.begin(), best.rates.end(), [&](const ArithmeticRate& known) {
            return known.isa == rate.isa && known.arithmetic == rate.arithmetic;
          });
      if (same == best.rates.end()) {
        best.rates.push_back(rate);
      } else {
        same->gflops = std::max(same->gflops, rate.gflops);
      }
    }
  }
  return best;
}

Judgement judge_arithmetic(std::span<const CeilingMeasurement> measurements,
                           const std::string& arithmetic) {
  const Ceilings best = best_of(measurements);
  const ArithmeticRate* chosen = find_rate(best, arithmetic);
  if (chosen == nullptr) return {TableVerdict::kNotMeasured, "not measured"};
  const ArithmeticRate* fastest = fastest_rate(best);
  if (!seems_wrong(best, arithmetic)) {
    return {TableVerdict::kFits, fmt::format("fits: {} reaches {:.0f} GFLOP/s, none is faster",
                                             chosen->arithmetic, chosen->gflops)};
  }
  const std::string rates =
      fmt::format("{} reaches {:.0f} GFLOP/s, {} reaches {:.0f}", chosen->arithmetic,
                  chosen->gflops, fastest->arithmetic, fastest->gflops);
  double least_share = 1;
  bool each_time = true;
  for (const CeilingMeasurement& measurement : measurements) {
    least_share = std::min(least_share, measurement.cpu_share);
    each_time = each_time && seems_wrong(measurement.ceilings, arithmetic);
  }
  if (least_share >= kIdleShare && each_time) {
    return {TableVerdict::kLooksWrong, "looks wrong: " + rates};
  }
  return {
      TableVerdict::kBusy,
      fmt::format("cannot tell, the machine is busy ({:.0f} % of the CPUs were free for this): {}",
                  100 * least_share, rates)};
}

std::vector<CeilingMeasurement> measure_machine(const Context& context,
                                                const std::string& arithmetic,
                                                const CeilingOptions& options) {
  std::vector<CeilingMeasurement> measurements;
  do {
    measurements.push_back(measure_once(context, options));
  } while (measurements.size() < kMostMeasurements &&
           seems_wrong(best_of(measurements), arithmetic));
  return measurements;
}

}  // namespace conclave::tool
