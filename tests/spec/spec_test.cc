#include "conclave/spec.h"

#include "conclave/error.h"
#include "conclave/synthetic.h"

#include <gtest/gtest.h>

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

std::string rejection(const MoeSpec& spec) {
  try {
    validate(spec);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(MoeSpec, EachFieldOutOfRange_IsNamed) {
  EXPECT_EQ(rejection(small_spec()), "accepted");
  const auto with = [](auto change) {
    MoeSpec spec = small_spec();
    change(spec);
    return rejection(spec);
  };
  EXPECT_NE(with([](MoeSpec& s) { s.num_experts = 0; }).find("num_experts"), std::string::npos);
  EXPECT_NE(with([](MoeSpec& s) { s.top_k = 5; }).find("limit 1 to 4"), std::string::npos);
  EXPECT_NE(with([](MoeSpec& s) { s.hidden_size = -1; }).find("hidden_size"), std::string::npos);
  EXPECT_NE(with([](MoeSpec& s) { s.intermediate_size = int64_t{1} << 40; }).find("intermediate"),
            std::string::npos);
  EXPECT_NE(with([](MoeSpec& s) { s.weight_dtype = DType::kU8; }).find("weight_dtype"),
            std::string::npos);
  EXPECT_NE(with([](MoeSpec& s) { s.router.logits_dtype = DType::kF64; }).find("logits_dtype"),
            std::string::npos);
  EXPECT_NE(with([](MoeSpec& s) { s.shared.mode = SharedMode::kAdd; }).find("shared"),
            std::string::npos);
}

TEST(ParallelSpec, RankOutsideSize_IsRejected) {
  EXPECT_THROW(validate(ParallelSpec{.ep_size = 0}), Error);
  EXPECT_THROW(validate(ParallelSpec{.ep_size = 2, .ep_rank = 2}), Error);
  EXPECT_THROW(validate(ParallelSpec{.ep_size = 2, .ep_rank = -1}), Error);
  EXPECT_NO_THROW(validate(ParallelSpec{.ep_size = 2, .ep_rank = 1}));
}

TEST(CountParameters, SharedExpertAndGate_AreCountedOnce) {
  MoeSpec spec = small_spec();
  const int64_t expert = 3 * 8 * 6;
  EXPECT_EQ(count_parameters(spec).total, 4 * expert + 4 * 8);
  EXPECT_EQ(count_parameters(spec).active, 2 * expert + 4 * 8);
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 5};
  EXPECT_EQ(count_parameters(spec).active, 2 * expert + 4 * 8 + 3 * 8 * 5 + 8);
}

TEST(ModelPresets, Each_IsValidAndFoundByName) {
  EXPECT_GE(model_presets().size(), 4U);
  for (const ModelPreset& preset : model_presets()) {
    EXPECT_NO_THROW(validate(preset.spec)) << preset.name;
    EXPECT_EQ(find_preset(preset.name)->spec.hidden_size, preset.spec.hidden_size);
  }
  EXPECT_EQ(find_preset("nothing"), nullptr);
  EXPECT_EQ(find_preset("qwen3-30b-a3b")->spec.intermediate_size, 768);
}

}  // namespace
}  // namespace conclave
