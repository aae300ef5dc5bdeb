// A token has more choices than a warp has lanes: given ones run, and those that logits make, up to
// the columns that the router takes.

#include "device_layer.h"

#include <gtest/gtest.h>

#include <string>

namespace conclave {
namespace {

using testing::DeviceForward;
using testing::DeviceLayer;
using testing::make_spec;
using testing::NumberForm;
using testing::random_tensor;

class CudaManyChoices : public testing::CudaLayerTest {};

TEST_F(CudaManyChoices, GivenOnes_RunOnEveryForm) {
  for (const NumberForm& form : testing::number_forms()) {
    for (const int64_t top_k : {33, 60, 64}) {
      SCOPED_TRACE(form.name + ", " + std::to_string(top_k));
      MoeSpec spec = testing::with_form(make_spec(64, top_k, 256, 128, form.dtype), form);
      spec.has_gate = false;
      DeviceLayer owned(spec, {.max_tokens = 512});
      for (const int64_t tokens : {1, 2, 8, 9, 40, 300, 512}) {
        const DType dtype = testing::row_dtype(form);
        const Tensor hidden = random_tensor(dtype, tokens, 256, 5);
        testing::GivenRouting routing = testing::random_routing(tokens, 64, top_k, 9);
        for (int64_t i = 0; i < tokens * top_k; ++i) {
          routing.ids.as<int32_t>()[i] = static_cast<int32_t>(i % top_k * 7 % 64);
          if (i % 13 == 0) routing.ids.as<int32_t>()[i] = -1;
        }
        DeviceForward forward(owned, hidden.view(), dtype);
        forward.route_by(routing.ids, routing.weights);
        forward.enqueue();
        EXPECT_LE(testing::worst_error(owned, hidden, routing, forward.out()), 6e-3) << tokens;
      }
    }
  }
}

TEST_F(CudaManyChoices, LogitsOfTooManyColumns_AreRefusedWithTheLimit) {
  MoeSpec spec = make_spec(1000, 33, 64, 32, DType::kBF16);
  spec.num_zero_experts = 25;
  spec.has_gate = false;
  DeviceLayer owned(spec, {.max_tokens = 64});
  const Tensor hidden = random_tensor(DType::kBF16, 5, 64, 5);
  DeviceForward forward(owned, hidden.view(), DType::kBF16);
  forward.route_by_logits(random_tensor(DType::kF32, 5, 1025, 6));
  try {
    forward.enqueue();
    ADD_FAILURE() << "ran";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("exceeds 1024"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace conclave
