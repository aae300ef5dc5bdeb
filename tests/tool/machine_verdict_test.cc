// Tests the verdict of doctor on the table of arithmetics, from made-up measurements and on this
// machine while others use it.
#include "machine_verdict.h"

#include <gtest/gtest.h>

namespace conclave::tool {
namespace {

CeilingMeasurement rates(double fma, double bf16, double cpu_share = 1) {
  CeilingMeasurement measurement;
  measurement.ceilings.read_gbps = fma;
  measurement.ceilings.rates = {{.isa = "avx512", .arithmetic = "f32_fma", .gflops = fma},
                                {.isa = "amx", .arithmetic = "amx_bf16", .gflops = bf16}};
  measurement.cpu_share = cpu_share;
  return measurement;
}

TEST(MachineVerdict, ChosenIsFastest_Fits) {
  const CeilingMeasurement one[] = {rates(100, 200)};
  EXPECT_EQ(judge_arithmetic(one, "amx_bf16").verdict, TableVerdict::kFits);
  const CeilingMeasurement within_scatter[] = {rates(200, 185)};
  EXPECT_EQ(judge_arithmetic(within_scatter, "amx_bf16").verdict, TableVerdict::kFits);
}

TEST(MachineVerdict, SlowerEachTimeOnAnIdleMachine_LooksWrong) {
  const CeilingMeasurement three[] = {rates(200, 100), rates(190, 100), rates(200, 110)};
  const Judgement judgement = judge_arithmetic(three, "amx_bf16");
  EXPECT_EQ(judgement.verdict, TableVerdict::kLooksWrong);
  EXPECT_EQ(judgement.text, "looks wrong: amx_bf16 reaches 110 GFLOP/s, f32_fma reaches 200");
}

TEST(MachineVerdict, OthersAtWork_IsNoReasonForAReport) {
  const CeilingMeasurement three[] = {rates(200, 100), rates(190, 100, 0.6), rates(200, 110)};
  const Judgement judgement = judge_arithmetic(three, "amx_bf16");
  EXPECT_EQ(judgement.verdict, TableVerdict::kBusy);
  EXPECT_NE(judgement.text.find("the machine is busy (60 %"), std::string::npos) << judgement.text;
}

TEST(MachineVerdict, LaterMeasurementThatFits_Wins) {
  const CeilingMeasurement two[] = {rates(200, 100), rates(200, 400)};
  EXPECT_EQ(judge_arithmetic(two, "amx_bf16").verdict, TableVerdict::kFits);
}

TEST(MachineVerdict, NotWrongEachTime_IsBusy) {
  const CeilingMeasurement two[] = {rates(400, 100), rates(90, 100)};
  EXPECT_EQ(judge_arithmetic(two, "amx_bf16").verdict, TableVerdict::kBusy);
}

TEST(MachineVerdict, UnknownArithmetic_IsNotMeasured) {
  const CeilingMeasurement one[] = {rates(100, 200)};
  EXPECT_EQ(judge_arithmetic(one, "dpbf16").verdict, TableVerdict::kNotMeasured);
  EXPECT_EQ(judge_arithmetic({}, "amx_bf16").verdict, TableVerdict::kNotMeasured);
}

TEST(MachineVerdict, BestOf_TakesEachCeilingApart) {
  const CeilingMeasurement two[] = {rates(100, 50), rates(80, 70)};
  const Ceilings best = best_of(two);
  ASSERT_EQ(best.rates.size(), 2U);
  EXPECT_EQ(best.read_gbps, 100);
  EXPECT_EQ(best.rates[0].gflops, 100);
  EXPECT_EQ(best.rates[1].gflops, 70);
}

TEST(MachineVerdict, WhatFits_IsMeasuredOnce) {
  const Context context({.num_threads = 1, .isa = "avx2"});
  // Reading the memory that doctor reads takes half a minute under AddressSanitizer.
  const std::vector<CeilingMeasurement> fitting =
      measure_machine(context, "f32_fma", {.read_bytes = int64_t{64} << 20, .repetitions = 1});
  EXPECT_EQ(fitting.size(), 1U);
  for (const CeilingMeasurement& measurement : fitting) {
    EXPECT_GT(measurement.cpu_share, 0);
    EXPECT_LE(measurement.cpu_share, 1);
  }
}

}  // namespace
}  // namespace conclave::tool
