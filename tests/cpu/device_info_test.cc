#include "cpu/isa.h"

#include "conclave/comm.h"
#include "conclave/context.h"
#include "conclave/device.h"
#include "conclave/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

namespace conclave {
namespace {

constexpr CeilingOptions kQuick{
    .read_bytes = int64_t{8} << 20, .repetitions = 1, .seconds_per_rate = 0.005};

TEST(CpuInfo, ThisMachine_IsDescribed) {
  const CpuInfo info = cpu_info();
  EXPECT_FALSE(info.vendor.empty());
  EXPECT_GT(info.family, 0);
  EXPECT_GE(info.usable_cpus, 1);
  EXPECT_GT(info.memory_bytes, 0);
  EXPECT_FALSE(info.huge_pages.empty());
  EXPECT_NO_THROW(cpu::parse_arithmetic(info.arithmetic));
  EXPECT_FALSE(info.arithmetic_reason.empty());
}

TEST(CpuInfo, Isas_AreBestFirstWithReasons) {
  const CpuInfo info = cpu_info();
  ASSERT_EQ(info.isas.size(), 6U);
  EXPECT_EQ(info.isas.back().name, "scalar");
  EXPECT_TRUE(info.isas.back().usable);
  for (const IsaInfo& isa : info.isas) EXPECT_EQ(isa.usable, isa.reason.empty()) << isa.name;
  const auto best = std::find_if(info.isas.begin(), info.isas.end(),
                                 [](const IsaInfo& isa) { return isa.usable; });
  EXPECT_EQ(best->name, cpu::to_string(cpu::best_isa()));
}

TEST(Backends, ThisBuild_ExplainsEachAbsence) {
  for (const BackendInfo& backend : backends()) {
    EXPECT_FALSE(backend.reason.empty()) << backend.name;
    if (backend.name == "cuda") continue;
    // A build with a transport of this name says of the backend what that says of itself.
    const std::vector<TransportInfo> infos = transports();
    const auto found = std::ranges::find(infos, backend.name, &TransportInfo::name);
    if (found == infos.end()) {
      EXPECT_FALSE(backend.usable) << backend.name;
      EXPECT_TRUE(backend.reason.starts_with("this build has no ")) << backend.reason;
      continue;
    }
    EXPECT_EQ(backend.usable, found->usable) << backend.name;
    EXPECT_EQ(backend.reason, found->reason);
  }
}

TEST(MeasureCeilings, EveryUsableIsa_HasARateOfEachArithmetic) {
  const Context context({.num_threads = 2});
  const Ceilings ceilings = measure_ceilings(context, kQuick);
  EXPECT_GT(ceilings.read_gbps, 0);
  EXPECT_TRUE(std::isfinite(ceilings.read_gbps));
  double best_of_values = 0;
  double best_of_codes = 0;
  size_t rates = 0;
  for (const IsaInfo& isa : cpu_info().isas) {
    // Bytes are multiplied beside float32 by avx2, and beside bf16 by amx.
    const size_t arithmetics = isa.name == "avx2" || isa.name == "amx" ? 2 : 1;
    rates += isa.usable ? arithmetics : 0;
  }
  EXPECT_EQ(ceilings.rates.size(), rates);
  for (const ArithmeticRate& rate : ceilings.rates) {
    EXPECT_GT(rate.gflops, 0) << rate.isa;
    EXPECT_TRUE(std::isfinite(rate.gflops)) << rate.isa;
    double& best = rate.of_codes ? best_of_codes : best_of_values;
    best = std::max(best, rate.gflops);
  }
  EXPECT_EQ(ceilings.best_gflops(), best_of_values);
  EXPECT_EQ(ceilings.best_gflops("dpbf16"), best_of_values);
  EXPECT_EQ(ceilings.best_gflops("int8_dot"), best_of_codes > 0 ? best_of_codes : best_of_values);
}

TEST(MeasureCeilings, ForcedScalar_MeasuresNothingWider) {
  const Context context({.num_threads = 1, .isa = "scalar"});
  const Ceilings ceilings = measure_ceilings(context, kQuick);
  ASSERT_EQ(ceilings.rates.size(), 1U);
  EXPECT_EQ(ceilings.rates[0].isa, "scalar");
  EXPECT_EQ(ceilings.rates[0].arithmetic, "f32_fma");
}

TEST(MeasureCeilings, SizeOutOfRange_IsATypedError) {
  const Context context({.num_threads = 1});
  for (const CeilingOptions& options :
       {CeilingOptions{.read_bytes = 0}, CeilingOptions{.read_bytes = -5},
        CeilingOptions{.read_bytes = int64_t{4} << 20, .repetitions = 0}}) {
    try {
      static_cast<void>(measure_ceilings(context, options));
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    }
  }
}

TEST(MeasureCeilings, MoreMemoryThanThereIs_IsATypedError) {
  const Context context({.num_threads = 1});
  try {
    static_cast<void>(measure_ceilings(context, {.read_bytes = int64_t{1} << 50}));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
  }
}

TEST(Ceilings, NoRates_BestIsZero) { EXPECT_EQ(Ceilings{}.best_gflops(), 0); }

}  // namespace
}  // namespace conclave
