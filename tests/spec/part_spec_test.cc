// Tests parts of a layer out of range, and combinations without a meaning.

#include "conclave/error.h"
#include "conclave/spec.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace conclave {
namespace {

MoeSpec small_spec() {
  MoeSpec spec;
  spec.num_experts = 4;
  spec.top_k = 2;
  spec.hidden_size = 8;
  spec.intermediate_size = 6;
  return spec;
}

struct Refusal {
  const char* field;
  const char* text;  // the value or the limit in the message
  void (*change)(MoeSpec& spec);
};

constexpr Refusal kRefusals[] = {
    {"num_zero_experts", "-1", [](MoeSpec& s) { s.num_zero_experts = -1; }},
    {"top_k", "1 to 7",
     [](MoeSpec& s) {
       s.num_zero_experts = 3;
       s.top_k = 8;
     }},
    {"shared.mode", "99",
     [](MoeSpec& s) { s.shared = {.mode = static_cast<SharedMode>(99), .intermediate_size = 3}; }},
    {"weight_on", "7", [](MoeSpec& s) { s.weight_on = static_cast<WeightOn>(7); }},
    {"shared.intermediate_size", "default", [](MoeSpec& s) { s.shared.intermediate_size = 3; }},
    {"shared.count", "default", [](MoeSpec& s) { s.shared.count = 2; }},
    {"shared.has_bias", "default", [](MoeSpec& s) { s.shared.has_bias = true; }},
    {"shared.activation", "default", [](MoeSpec& s) { s.shared.activation.name = "gelu"; }},
    {"shared.activation", "routed", [](MoeSpec& s) { s.shared.activation.limit = 7; }},
    {"shared.slot_weight", "kFusedSlots",
     [](MoeSpec& s) {
       s.shared = {.mode = SharedMode::kAdd, .intermediate_size = 3, .slot_weight = 2};
     }},
    {"shared.slot_weight", "float32",
     [](MoeSpec& s) {
       s.shared = {.mode = SharedMode::kFusedSlots,
                   .intermediate_size = 3,
                   .slot_weight = std::numeric_limits<double>::infinity()};
     }},
    {"shared.count", "kFusedSlots",
     [](MoeSpec& s) {
       s.shared = {.mode = SharedMode::kAverage, .intermediate_size = 3, .count = 2};
     }},
    {"shared.count", "0",
     [](MoeSpec& s) {
       s.shared = {.mode = SharedMode::kFusedSlots, .intermediate_size = 3, .count = 0};
     }},
    {"shared.mode", "zero experts",
     [](MoeSpec& s) {
       s.shared = {.mode = SharedMode::kFusedSlots, .intermediate_size = 3};
       s.num_zero_experts = 1;
     }},
    {"latent.size", "-3", [](MoeSpec& s) { s.latent.size = -3; }},
    {"latent.has_norm", "true", [](MoeSpec& s) { s.latent.has_norm = true; }},
    {"latent.norm_epsilon", "at least 0",
     [](MoeSpec& s) { s.latent = {.size = 4, .norm_epsilon = -1e-6}; }},
    {"residual.intermediate_size", "-1", [](MoeSpec& s) { s.residual.intermediate_size = -1; }},
    {"residual.activation", "silu", [](MoeSpec& s) { s.residual.activation.name = "silu"; }},
    {"weight_on", "kFusedSlots",
     [](MoeSpec& s) {
       s.weight_on = WeightOn::kInput;
       s.shared = {.mode = SharedMode::kFusedSlots, .intermediate_size = 3};
     }},
    {"output_scale", "float32", [](MoeSpec& s) { s.output_scale = 1e300; }},
    {"output_scale", "float32",
     [](MoeSpec& s) { s.output_scale = std::numeric_limits<double>::quiet_NaN(); }},
};

TEST(PartSpec, EachWithoutAMeaning_IsRefusedByFieldAndLimit) {
  for (const Refusal& refusal : kRefusals) {
    MoeSpec spec = small_spec();
    refusal.change(spec);
    try {
      validate(spec);
      ADD_FAILURE() << refusal.field << " was accepted";
    } catch (const Error& error) {
      const std::string what = error.what();
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << what;
      EXPECT_NE(what.find("MoeSpec." + std::string(refusal.field)), std::string::npos) << what;
      EXPECT_NE(what.find(refusal.text), std::string::npos) << what;
    }
  }
}

TEST(PartSpec, EveryPartAtOnce_IsAccepted) {
  MoeSpec spec = small_spec();
  spec.has_bias = true;
  spec.has_output_bias = true;
  spec.num_zero_experts = 2;
  spec.top_k = 6;
  spec.output_scale = 0.5;
  spec.latent = {.size = 5, .has_norm = true};
  spec.residual = {.intermediate_size = 7, .activation = {.name = "relu2_no_mul"}};
  spec.shared = {.mode = SharedMode::kSoftmaxMix,
                 .intermediate_size = 3,
                 .activation = {.name = "gelu"},
                 .has_bias = true};
  EXPECT_NO_THROW(validate(spec));
}

TEST(CountParameters, EveryPart_IsCountedByHand) {
  MoeSpec spec = small_spec();  // E 4, k 2, H 8, I 6
  spec.activation.name = "relu2_no_mul";
  spec.has_bias = true;
  spec.has_output_bias = true;
  spec.latent = {.size = 5, .has_norm = true};
  spec.residual = {.intermediate_size = 7, .activation = {.name = "silu"}};
  spec.shared = {.mode = SharedMode::kFusedSlots, .intermediate_size = 3, .count = 2};
  const int64_t expert = 2 * 5 * 6 + 6 + 5;
  const int64_t common = 4 * 8 + 8 + (2 * 5 * 8 + 5) + 3 * 7 * 8 + 2 * 2 * 3 * 8;
  EXPECT_EQ(count_parameters(spec).total, 4 * expert + common);
  EXPECT_EQ(count_parameters(spec).active, 2 * expert + common);
  spec.num_zero_experts = 3;
  spec.shared = {};
  spec.top_k = 7;
  const int64_t with_zero = common - 2 * 2 * 3 * 8 + 3 * 8;
  EXPECT_EQ(count_parameters(spec).active, 4 * expert + with_zero);
}

}  // namespace
}  // namespace conclave
