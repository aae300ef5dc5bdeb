// R1, R2, R3, N5: routing that is hostile, degenerate or skewed, and values that are not finite.

#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::make_layer;
using testing::make_spec;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::row_bytes;
using testing::run_layer;
using testing::same_bits;

constexpr int64_t kExperts = 6;
constexpr int64_t kHidden = 40;
constexpr int64_t kTokens = 9;

MoeSpec spec_of() { return make_spec(kExperts, 2, kHidden, 24, DType::kBF16); }

struct GivenRouting {
  Tensor ids{DType::kI64, {kTokens, 2}};
  Tensor weights{DType::kF32, {kTokens, 2}};

  GivenRouting() {
    for (int64_t i = 0; i < kTokens * 2; ++i) {
      ids.as<int64_t>()[i] = i % kExperts;
      weights.as<float>()[i] = 0.5F + 0.01F * static_cast<float>(i);
    }
  }
  ForwardArgs args() const { return {.topk_ids = ids.view(), .topk_weights = weights.view()}; }
};

const int64_t kHostileIds[] = {-2,
                               kExperts,
                               kExperts + 1,
                               1 << 15,
                               std::numeric_limits<int32_t>::min(),
                               std::numeric_limits<int32_t>::max(),
                               (int64_t{1} << 32) + 1,  // truncates to the valid id 1
                               std::numeric_limits<int64_t>::min(),
                               std::numeric_limits<int64_t>::max()};

TEST(HostileIds, Strict_NamesTokenAndSlotAndWritesNothing) {
  const OwnedLayer owned = make_layer(spec_of(), {.max_tokens = 2});
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 1);
  for (const int64_t id : kHostileIds) {
    GivenRouting routing;
    routing.ids.as<int64_t>()[5 * 2 + 1] = id;
    Tensor out(DType::kF32, {kTokens, kHidden});
    ForwardArgs args = routing.args();
    args.hidden = hidden.view();
    args.out = out.view();
    try {
      owned.layer.forward(args);
      ADD_FAILURE() << id << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kExpertId);
      EXPECT_NE(std::string(error.what()).find("token 5, slot 1"), std::string::npos)
          << error.what();
      EXPECT_EQ(error.detail().found, std::to_string(id));
    }
    for (int64_t i = 0; i < kTokens * kHidden; ++i) ASSERT_EQ(out.as<float>()[i], 0.0F);
  }
}

TEST(HostileIds, Skip_ContributesNothingAndIsCounted) {
  const OwnedLayer owned = make_layer(spec_of(), {.id_policy = IdPolicy::kSkip});
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 1);
  GivenRouting absent;
  absent.ids.as<int64_t>()[5 * 2 + 1] = -1;
  const auto expected = run_layer(owned.layer, hidden.view(), DType::kF32, absent.args());
  EXPECT_EQ(owned.layer.status().skipped_ids, 0) << "-1 is not an error";
  int64_t skipped = 0;
  for (const int64_t id : kHostileIds) {
    GivenRouting routing;
    routing.ids.as<int64_t>()[5 * 2 + 1] = id;
    const auto output = run_layer(owned.layer, hidden.view(), DType::kF32, routing.args());
    EXPECT_TRUE(same_bits(output.out, expected.out)) << id;
    EXPECT_EQ(owned.layer.status().skipped_ids, ++skipped);
  }
}

TEST(HostileIds, RandomNoise_NeverTouchesOtherTokens) {
  const OwnedLayer owned = make_layer(spec_of(), {.id_policy = IdPolicy::kSkip});
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 1);
  const GivenRouting clean;
  const auto expected = run_layer(owned.layer, hidden.view(), DType::kF32, clean.args());
  std::mt19937_64 random(5);
  for (int trial = 0; trial < 500; ++trial) {
    GivenRouting routing;
    for (int64_t i = 0; i < 2; ++i) {
      routing.ids.as<int64_t>()[i] = static_cast<int64_t>(random());
      routing.weights.as<float>()[i] = static_cast<float>(random());
    }
    const auto output = run_layer(owned.layer, hidden.view(), DType::kF32, routing.args());
    for (int64_t token = 1; token < kTokens; ++token) {
      ASSERT_EQ(row_bytes(output.out, token), row_bytes(expected.out, token));
    }
  }
}

// A router that breaks its contract is treated like bad ids from a caller.
class WildRouter final : public Router {
 public:
  RouterStats route(const RouterInput& input, const RouterOutput& output,
                    Executor&) const override {
    for (int64_t i = 0; i < input.num_tokens * 2; ++i) {
      output.topk_ids[i] = i == 3 ? 1000000 : 0;
      output.topk_weights[i] = 1.0F;
    }
    return {};
  }
};

TEST(HostileIds, CustomRouter_IsCheckedToo) {
  MoeSpec spec = spec_of();
  spec.router.name = "wild";
  Context context({.num_threads = 1});
  context.add_router("wild", [](const MoeSpec&) { return std::make_unique<WildRouter>(); });
  const auto source = make_synthetic_source(spec, 1);
  const MoeLayer strict = MoeLayer::create(context, spec, *source);
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 1);
  EXPECT_EQ(code_of([&] { run_layer(strict, hidden.view(), DType::kF32); }), ErrorCode::kExpertId);
  const MoeLayer skip = MoeLayer::create(context, spec, *source, {.id_policy = IdPolicy::kSkip});
  run_layer(skip, hidden.view(), DType::kF32);
  EXPECT_EQ(skip.status().skipped_ids, 1);
}

TEST(DegenerateRouting, AllSlotsSkipped_IsZero) {
  const OwnedLayer owned = make_layer(spec_of());
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 1);
  GivenRouting routing;
  std::fill_n(routing.ids.as<int64_t>(), kTokens * 2, -1);
  const auto output = run_layer(owned.layer, hidden.view(), DType::kF32, routing.args());
  for (int64_t i = 0; i < kTokens * kHidden; ++i) EXPECT_EQ(output.out.as<float>()[i], 0.0F);
}

TEST(DegenerateRouting, OneHotExpert_IsExact) {
  const int64_t tokens = 300;
  const OwnedLayer owned = make_layer(spec_of(), {.max_tokens = 1024});
  const Tensor hidden = random_tensor(DType::kBF16, tokens, kHidden, 1);
  Tensor ids(DType::kI32, {tokens, 2});
  Tensor weights(DType::kF32, {tokens, 2});
  std::fill_n(ids.as<int32_t>(), tokens * 2, 3);
  std::fill_n(weights.as<float>(), tokens * 2, 0.5F);
  const auto output = run_layer(owned.layer, hidden.view(), DType::kF32,
                                {.topk_ids = ids.view(), .topk_weights = weights.view()});
  const StageCheck check =
      check_against_reference(*owned.context, owned.layer.spec(), *owned.source,
                              {.hidden = hidden.view(),
                               .topk_ids = ids.view(),
                               .topk_weights = weights.view(),
                               .output = output.out.view()});
  EXPECT_LE(check.worst_token_error, accuracy_bar(DType::kBF16, DType::kF32));
}

TEST(DegenerateRouting, NoFiniteLogit_GivesZeroAndCounts) {
  const OwnedLayer owned = make_layer(spec_of());
  const Tensor hidden = random_tensor(DType::kF32, 3, kHidden, 1);
  Tensor logits = random_tensor(DType::kF32, 3, kExperts, 2);
  std::fill_n(logits.as<float>() + kExperts, kExperts, std::numeric_limits<float>::quiet_NaN());
  const auto output =
      run_layer(owned.layer, hidden.view(), DType::kF32, {.router_logits = logits.view()});
  EXPECT_EQ(output.ids.as<int32_t>()[2], 0);
  EXPECT_EQ(output.ids.as<int32_t>()[3], 1);
  EXPECT_EQ(output.weights.as<float>()[2], 0.0F);
  for (int64_t col = 0; col < kHidden; ++col) {
    EXPECT_EQ(output.out.as<float>()[kHidden + col], 0.0F);
  }
  EXPECT_EQ(owned.layer.status().tokens_without_finite_logit, 1);
}

bool row_is_finite(const Tensor& out, int64_t row) {
  const float* values = out.as<float>() + row * out.shape()[1];
  return std::all_of(values, values + out.shape()[1], [](float v) { return std::isfinite(v); });
}

class NonFinite : public ::testing::TestWithParam<std::string> {};

// N5: values that are not finite stay in the tokens that use them.
TEST_P(NonFinite, Activation_StaysInItsToken) {
  for (const float poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    const OwnedLayer owned = make_layer(spec_of(), {}, {.isa = GetParam()});
    Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 1);
    const GivenRouting routing;
    const auto clean = run_layer(owned.layer, hidden.view(), DType::kF32, routing.args());
    hidden.as<float>()[4 * kHidden + kHidden - 1] = poison;
    const auto poisoned = run_layer(owned.layer, hidden.view(), DType::kF32, routing.args());
    EXPECT_FALSE(row_is_finite(poisoned.out, 4)) << poison;
    for (int64_t token = 0; token < kTokens; ++token) {
      if (token != 4) {
        EXPECT_EQ(row_bytes(poisoned.out, token), row_bytes(clean.out, token));
      }
    }
  }
}

// Changes one weight of one expert, through the caller's pointers.
TEST_P(NonFinite, Weight_StaysInTheTokensOfItsExpert) {
  const Context context({.num_threads = 2, .isa = GetParam()});
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const MoeSpec spec = [&] {
      MoeSpec s = make_spec(kExperts, 2, kHidden, 24, dtype);
      s.has_gate = false;
      return s;
    }();
    Tensor gate_up(dtype, {kExperts, 48, kHidden});
    Tensor down(dtype, {kExperts, kHidden, 24});
    fill_random({gate_up.view().data, dtype, {kExperts * 48, kHidden}, 0}, 1);
    fill_random({down.view().data, dtype, {kExperts * kHidden, 24}, 0}, 2);
    const auto source =
        make_pointer_source({.gate_up = gate_up.const_view(), .down = down.const_view()});
    const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 3);
    const GivenRouting routing;
    const MoeLayer clean_layer = MoeLayer::create(context, spec, *source);
    const auto clean = run_layer(clean_layer, hidden.view(), DType::kF32, routing.args());
    // The last element of expert 3's down matrix.
    const int64_t poisoned_element = 4 * kHidden * 24 - 1;
    if (dtype == DType::kF32) {
      down.as<float>()[poisoned_element] = std::numeric_limits<float>::quiet_NaN();
    } else {
      down.as<uint16_t>()[poisoned_element] = 0x7fc0;
    }
    const MoeLayer layer = MoeLayer::create(context, spec, *source);
    const auto poisoned = run_layer(layer, hidden.view(), DType::kF32, routing.args());
    for (int64_t token = 0; token < kTokens; ++token) {
      const bool uses = routing.ids.as<int64_t>()[token * 2] == 3 ||
                        routing.ids.as<int64_t>()[token * 2 + 1] == 3;
      EXPECT_EQ(row_is_finite(poisoned.out, token), !uses) << token;
      if (!uses) {
        EXPECT_EQ(row_bytes(poisoned.out, token), row_bytes(clean.out, token));
      }
    }
  }
}

TEST_P(NonFinite, RoutingWeight_StaysInItsToken) {
  const OwnedLayer owned = make_layer(spec_of(), {}, {.isa = GetParam()});
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 1);
  GivenRouting routing;
  const auto clean = run_layer(owned.layer, hidden.view(), DType::kF32, routing.args());
  routing.weights.as<float>()[2 * 2] = std::numeric_limits<float>::quiet_NaN();
  const auto poisoned = run_layer(owned.layer, hidden.view(), DType::kF32, routing.args());
  for (int64_t token = 0; token < kTokens; ++token) {
    EXPECT_EQ(row_is_finite(poisoned.out, token), token != 2);
    if (token != 2) {
      EXPECT_EQ(row_bytes(poisoned.out, token), row_bytes(clean.out, token));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryRow, NonFinite, ::testing::ValuesIn(testing::usable_isas()),
                         [](const auto& row) { return row.param; });

}  // namespace
}  // namespace conclave
