#include "activation/activations.h"
#include "support/ulp.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace conclave::testing {
namespace {

using activation::Activation;
using activation::apply_reference;
using activation::apply_scalar;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// activation/silu.h promises this.
constexpr double kMaxUlp = 4.0;

float silu(float gate) { return apply_scalar(Activation{}, gate, 1.0F); }
double silu_reference(float gate) {
  return apply_reference(Activation{}, static_cast<double>(gate), 1.0);
}

TEST(Silu, EveryExponent_WithinPromisedUlp) {
  double worst = 0.0;
  float where = 0.0F;
  // A prime stride over all finite bit patterns of one sign: about a million values.
  for (uint32_t sign : {0U, 0x80000000U}) {
    for (uint32_t bits = 0; bits < 0x7f800000U; bits += 2039) {
      const float gate = std::bit_cast<float>(bits | sign);
      const double error = ulp_error(silu(gate), silu_reference(gate));
      if (error > worst) {
        worst = error;
        where = gate;
      }
    }
  }
  EXPECT_LE(worst, kMaxUlp) << "at " << where;
  RecordProperty("worst_ulp", std::to_string(worst));
}

TEST(Silu, UsualRange_WithinPromisedUlp) {
  double worst = 0.0;
  for (int i = -1200000; i <= 1200000; ++i) {
    const float gate = static_cast<float>(i) * 1e-4F;
    worst = std::max(worst, ulp_error(silu(gate), silu_reference(gate)));
  }
  EXPECT_LE(worst, kMaxUlp);
}

TEST(Silu, Limits_AreTaken) {
  EXPECT_EQ(silu(kInf), kInf);
  EXPECT_EQ(silu(-kInf), 0.0F);
  EXPECT_TRUE(std::signbit(silu(-kInf)));
  EXPECT_EQ(silu(0.0F), 0.0F);
  EXPECT_TRUE(std::signbit(silu(-0.0F)));
  EXPECT_EQ(silu(std::numeric_limits<float>::max()), std::numeric_limits<float>::max());
  EXPECT_EQ(silu(std::numeric_limits<float>::lowest()), 0.0F);
  EXPECT_TRUE(std::isnan(silu(kNan)));
  EXPECT_TRUE(std::isnan(silu(-kNan)));
}

TEST(Silu, Reference_TakesLimitsToo) {
  EXPECT_EQ(apply_reference(Activation{}, -HUGE_VAL, 1.0), 0.0);
  EXPECT_EQ(apply_reference(Activation{}, HUGE_VAL, 1.0), HUGE_VAL);
  EXPECT_TRUE(std::isnan(apply_reference(Activation{}, NAN, 1.0)));
}

TEST(Silu, Up_MultipliesLast) {
  EXPECT_EQ(apply_scalar(Activation{}, 1.5F, -2.0F), silu(1.5F) * -2.0F);
  EXPECT_TRUE(std::isnan(apply_scalar(Activation{}, 1.0F, kNan)));
}

}  // namespace
}  // namespace conclave::testing
