// Checks every formula in float32 against float64: all magnitudes, the limits, NaN.
#include "activation/activations.h"
#include "activation/swiglu_oai.h"
#include "support/activations.h"
#include "support/ulp.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

using activation::Activation;
using activation::ActivationId;
using activation::apply_reference;
using activation::apply_scalar;
using activation::formula_parameters;
using activation::FormulaParameters;
using activation::FusedForm;
using activation::parse_activation;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kMax = std::numeric_limits<float>::max();
// activation/tanh.h promises this.
constexpr double kBendUlp = 5.0;

// An `up` whose factor is exactly 1, so that the gate's part shows alone. There is none for a
// formula that bends its up.
float neutral_up(const Activation& formula) {
  return formula.id == ActivationId::kSwigluOai ? static_cast<float>(1.0 - formula.beta) : 1.0F;
}
bool bends_up(const Activation& formula) { return formula.linear_beta > 0; }

// The part that bends, as a function of one number.
float bend(const Activation& formula, float x) {
  return formula.gated ? apply_scalar(formula, x, neutral_up(formula))
                       : apply_scalar(formula, kNan, x);
}
double bend_reference(const Activation& formula, float x) {
  return formula.gated ? apply_reference(formula, double{x}, double{neutral_up(formula)})
                       : apply_reference(formula, NAN, double{x});
}

std::string describe(const ActivationSpec& spec) {
  return spec.name + " limit " + std::to_string(spec.limit) + " beta " + std::to_string(spec.beta);
}

std::vector<float> special_values() {
  std::vector<float> values = {
      0.0F,   0x1p-149F,  0x1p-140F, 0x1.fffffcp-127F, 0x1p-126F, 0x1p-100F, 0x1p-12F, 0.5F,  0.7F,
      1.0F,   6.9999995F, 7.0F,      7.0000005F,       14.4F,     15.0F,     50.0F,    87.5F, 88.8F,
      103.9F, 104.0F,     110.0F,    130.0F,           1e4F,      1e20F,     kMax,     kInf,  kNan};
  const size_t positive = values.size();
  for (size_t i = 0; i < positive; ++i) values.push_back(-values[i]);
  return values;
}

// Kernels on GPUs unroll a fused form in place of the formula itself.
TEST(Formulas, FusedForm_IsTheSameFormula) {
  int fused = 0;
  for (const ActivationSpec& spec : all_activations()) {
    const Activation formula = parse_activation(spec);
    if (formula.fused == FusedForm::kNone) continue;
    fused += 1;
    EXPECT_TRUE(formula.gated) << describe(spec);
    FormulaParameters p = formula_parameters(formula);
    if (formula.fused == FusedForm::kSilu) p = {};
    for (const float gate : special_values()) {
      for (const float up : special_values()) {
        const double expected = apply_reference(formula, double{gate}, double{up});
        const double found = activation::SwigluOai::apply_reference(double{gate}, double{up}, p);
        EXPECT_TRUE(std::bit_cast<uint64_t>(found) == std::bit_cast<uint64_t>(expected) ||
                    (std::isnan(found) && std::isnan(expected)))
            << describe(spec) << " of " << gate << " and " << up << ": " << found << ", not "
            << expected;
      }
    }
  }
  EXPECT_GE(fused, 3);
}

TEST(Formulas, EveryExponent_WithinPromisedUlp) {
  for (const ActivationSpec& spec : all_activations()) {
    const Activation formula = parse_activation(spec);
    if (bends_up(formula)) continue;
    double worst = 0.0;
    float where = 0.0F;
    // A prime stride over all finite bit patterns of one sign.
    for (const uint32_t sign : {0U, 0x80000000U}) {
      for (uint32_t bits = 0; bits < 0x7f800000U; bits += 10007) {
        const float x = std::bit_cast<float>(bits | sign);
        const double error = ulp_error(bend(formula, x), bend_reference(formula, x));
        if (error > worst) {
          worst = error;
          where = x;
        }
      }
    }
    EXPECT_LE(worst, activation_ulp(formula.id)) << describe(spec) << " at " << where;
  }
}

TEST(Formulas, UsualRange_WithinPromisedUlp) {
  for (const ActivationSpec& spec : all_activations()) {
    const Activation formula = parse_activation(spec);
    if (bends_up(formula)) continue;
    double worst = 0.0;
    for (int i = -220000; i <= 220000; ++i) {
      const float x = static_cast<float>(i) * 5e-4F;
      worst = std::max(worst, ulp_error(bend(formula, x), bend_reference(formula, x)));
    }
    EXPECT_LE(worst, activation_ulp(formula.id)) << describe(spec);
  }
}

// An error of n units in a factor is at most 2 n units in the product; the product and the sum with
// beta round once more each.
TEST(Formulas, RandomGatesAndUps_WithinBarOfTheProduct) {
  std::mt19937_64 random(5);
  std::uniform_real_distribution<float> exponent(-40.0F, 5.0F);
  const auto draw = [&] {
    const float magnitude = std::exp2(exponent(random));
    return (random() & 1U) != 0 ? -magnitude : magnitude;
  };
  for (const ActivationSpec& spec : all_activations()) {
    const Activation formula = parse_activation(spec);
    if (!formula.gated) continue;
    const double units = activation_ulp(formula.id) + (bends_up(formula) ? kBendUlp : 0.0);
    for (int i = 0; i < 100000; ++i) {
      const float gate = draw();
      const float up = draw();
      const double exact = apply_reference(formula, double{gate}, double{up});
      ASSERT_LE(ulp_error(apply_scalar(formula, gate, up), exact), 2.0 * units + 2.0)
          << describe(spec) << " gate " << gate << " up " << up << " seed 5";
    }
  }
}

TEST(Formulas, SpecialValues_FollowTheReference) {
  for (const ActivationSpec& spec : all_activations()) {
    const Activation formula = parse_activation(spec);
    if (bends_up(formula)) continue;
    for (const float x : special_values()) {
      EXPECT_LE(ulp_error(bend(formula, x), bend_reference(formula, x)), activation_ulp(formula.id))
          << describe(spec) << " at " << x << ": " << bend(formula, x);
    }
  }
}

TEST(Formulas, InfiniteUps_FollowTheReference) {
  for (const ActivationSpec& spec : all_activations()) {
    const Activation formula = parse_activation(spec);
    if (!formula.gated) continue;
    for (const float gate : {-1.0F, 0.0F, 2.0F, 30.0F, kInf}) {
      for (const float up : {-kInf, -kMax, kMax, kInf}) {
        const double exact = apply_reference(formula, double{gate}, double{up});
        EXPECT_LE(ulp_error(apply_scalar(formula, gate, up), exact),
                  2.0 * (activation_ulp(formula.id) + kBendUlp) + 2.0)
            << describe(spec) << " gate " << gate << " up " << up;
      }
    }
  }
}

TEST(Formulas, Nan_PassesEveryClamp) {
  for (const ActivationSpec& spec : all_activations()) {
    const Activation formula = parse_activation(spec);
    for (const float nan : {kNan, -kNan}) {
      EXPECT_TRUE(std::isnan(apply_scalar(formula, 1.0F, nan))) << describe(spec);
      EXPECT_TRUE(std::isnan(apply_reference(formula, 1.0, double{nan}))) << describe(spec);
      if (!formula.gated) continue;
      EXPECT_TRUE(std::isnan(apply_scalar(formula, nan, 1.0F))) << describe(spec);
      EXPECT_TRUE(std::isnan(apply_reference(formula, double{nan}, 1.0))) << describe(spec);
    }
  }
}

TEST(Formulas, WithoutGate_TheGateIsNotRead) {
  for (const ActivationSpec& spec : all_activations()) {
    const Activation formula = parse_activation(spec);
    if (formula.gated) continue;
    EXPECT_EQ(apply_scalar(formula, kNan, 1.5F), apply_scalar(formula, 3.0F, 1.5F)) << spec.name;
  }
}

TEST(Formulas, Clamps_CutWhereTheySay) {
  const Activation before = parse_activation({.name = "silu_clamp_before", .limit = 2.0});
  const Activation silu = parse_activation({.name = "silu"});
  EXPECT_EQ(apply_scalar(before, 5.0F, 9.0F), apply_scalar(silu, 2.0F, 2.0F));
  EXPECT_EQ(apply_scalar(before, -5.0F, -9.0F), apply_scalar(silu, -5.0F, -2.0F));
  const Activation after = parse_activation({.name = "silu_clamp_after", .limit = 2.0});
  EXPECT_EQ(apply_scalar(after, 5.0F, 9.0F), 4.0F);
  EXPECT_EQ(apply_scalar(after, 2.1F, 1.0F), apply_scalar(silu, 2.1F, 1.0F));
  const ActivationSpec oai{.name = "swiglu_oai", .limit = 7.0, .alpha = 1.702, .beta = 1.0};
  ActivationSpec unlimited = oai;
  unlimited.limit = 0.0;
  EXPECT_EQ(apply_scalar(parse_activation(oai), 8.0F, 50.0F),
            apply_scalar(parse_activation(unlimited), 7.0F, 7.0F));
  EXPECT_EQ(apply_scalar(parse_activation(oai), -8.0F, -50.0F),
            apply_scalar(parse_activation(unlimited), -8.0F, -7.0F));
}

// The values are published: torch.nn.functional in float64.
TEST(Formulas, KnownValues_AreMet) {
  EXPECT_NEAR(apply_reference(parse_activation({.name = "gelu"}), 1.0, 1.0), 0.8413447460685429,
              1e-15);
  EXPECT_NEAR(apply_reference(parse_activation({.name = "gelu_tanh"}), 1.0, 1.0),
              0.8411919906082768, 1e-15);
  EXPECT_NEAR(apply_reference(parse_activation({.name = "silu"}), 1.0, 1.0), 0.7310585786300049,
              1e-15);
  EXPECT_EQ(apply_reference(parse_activation({.name = "relu2_no_mul"}), 0.0, 3.0), 9.0);
  EXPECT_EQ(apply_reference(parse_activation({.name = "relu2_no_mul"}), 0.0, -3.0), 0.0);
}

}  // namespace
}  // namespace conclave::testing
