#include "activation/activations.h"
#include "support/activations.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>

namespace conclave::testing {
namespace {

using activation::parse_activation;

// Returns the error for a spec that must be refused.
ErrorDetail refusal(const ActivationSpec& spec, ErrorCode code) {
  try {
    parse_activation(spec);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.detail();
  }
  ADD_FAILURE() << "accepted " << spec.name;
  return {};
}

void expect_refused(const ActivationSpec& spec, const std::string& field) {
  const ErrorDetail detail = refusal(spec, ErrorCode::kInvalidArgument);
  EXPECT_NE(detail.what.find("ActivationSpec." + field), std::string::npos) << detail.what;
  EXPECT_FALSE(detail.found.empty());
  EXPECT_FALSE(detail.limit.empty());
}

TEST(ParseActivation, EveryName_IsKnownAndTested) {
  std::set<activation::ActivationId> tested;
  for (const ActivationSpec& spec : all_activations()) {
    const activation::Activation parsed = parse_activation(spec);
    EXPECT_EQ(activation::to_string(parsed.id), spec.name);
    EXPECT_EQ(parsed.gated, is_gated(spec)) << spec.name;
    tested.insert(parsed.id);
  }
  EXPECT_EQ(tested.size(), size_t{activation::kNumActivations});
}

TEST(ParseActivation, UnknownName_ListsTheKnown) {
  const ErrorDetail detail = refusal({.name = "tanh"}, ErrorCode::kUnknownName);
  EXPECT_EQ(detail.found, "tanh");
  for (const ActivationSpec& spec : all_activations()) {
    EXPECT_NE(detail.expected.find(spec.name), std::string::npos) << spec.name;
  }
}

TEST(ParseActivation, MissingParameter_IsRefused) {
  expect_refused({.name = "silu_clamp_before"}, "limit");
  expect_refused({.name = "silu_clamp_after"}, "limit");
  expect_refused({.name = "swiglu_oai", .limit = 7.0, .beta = 1.0}, "alpha");
  expect_refused({.name = "swiglu_oai", .limit = 7.0, .alpha = 1.702}, "beta");
  expect_refused({.name = "situ", .linear_beta = 25.0}, "beta");
}

TEST(ParseActivation, ParameterTheFormulaLacks_IsRefused) {
  expect_refused({.name = "silu", .limit = 7.0}, "limit");
  expect_refused({.name = "gelu", .alpha = 1.0}, "alpha");
  expect_refused({.name = "gelu_tanh", .beta = 1.0}, "beta");
  expect_refused({.name = "relu2_no_mul", .linear_beta = 1.0}, "linear_beta");
  expect_refused({.name = "situ", .limit = 1.0, .beta = 4.0}, "limit");
  expect_refused(
      {.name = "swiglu_oai", .limit = 7.0, .alpha = 1.7, .beta = 1.0, .linear_beta = 2.0},
      "linear_beta");
}

TEST(ParseActivation, NegativeOrNotFinite_IsRefused) {
  for (const double bad : {-1.0, -1e-30, HUGE_VAL, -HUGE_VAL, std::nan(""), 1e-9, 1e300}) {
    expect_refused({.name = "silu_clamp_before", .limit = bad}, "limit");
    expect_refused({.name = "swiglu_oai", .limit = bad, .alpha = 1.0, .beta = 1.0}, "limit");
    expect_refused({.name = "swiglu_oai", .alpha = bad, .beta = 1.0}, "alpha");
    expect_refused({.name = "situ", .beta = bad}, "beta");
    expect_refused({.name = "situ", .beta = 4.0, .linear_beta = bad}, "linear_beta");
    expect_refused({.name = "silu", .alpha = bad}, "alpha");
  }
}

TEST(ParseActivation, Parameters_AreRoundedToFloat32) {
  const auto parsed = parse_activation({.name = "swiglu_oai", .alpha = 1.702, .beta = 1.0});
  EXPECT_EQ(parsed.alpha, double{1.702F});
  EXPECT_EQ(parsed.limit, 0.0);
}

}  // namespace
}  // namespace conclave::testing
