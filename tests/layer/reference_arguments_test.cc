// The oracle's arguments: each wrong one gives a typed error, as for a layer.

#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>

namespace conclave {
namespace {

using testing::code_of;
using testing::make_spec;
using testing::random_tensor;

constexpr int64_t kTokens = 4;
constexpr int64_t kHidden = 16;
constexpr int64_t kExperts = 5;

class ReferenceArguments : public ::testing::Test {
 protected:
  ReferenceArguments()
      : spec_(make_spec(kExperts, 2, kHidden, 12, DType::kF32)),
        context_({.num_threads = 1}),
        hidden_(random_tensor(DType::kF32, kTokens, kHidden, 1)),
        logits_(random_tensor(DType::kF32, kTokens, kExperts, 2)),
        ids_(DType::kI32, {kTokens, 2}),
        weights_(random_tensor(DType::kF32, kTokens, 2, 3)),
        few_(random_tensor(DType::kF32, kTokens - 1, kHidden, 4)) {}

  // Returns the code that the oracle throws for valid arguments after `change`.
  ErrorCode rejection(const std::function<void(ReferenceArgs&)>& change) const {
    ReferenceArgs args{.hidden = hidden_.view()};
    change(args);
    const auto source = make_synthetic_source(spec_, 1);
    return code_of([&] { reference_forward(context_, spec_, *source, args); });
  }

  MoeSpec spec_;
  Context context_;
  Tensor hidden_, logits_, ids_, weights_, few_;
};

TEST_F(ReferenceArguments, ValidOnes_AreAccepted) {
  EXPECT_EQ(rejection([](ReferenceArgs&) {}), ErrorCode{0});
  EXPECT_EQ(rejection([&](ReferenceArgs& a) { a.router_logits = logits_.const_view(); }),
            ErrorCode{0});
  EXPECT_EQ(rejection([&](ReferenceArgs& a) {
              a.topk_ids = ids_.const_view();
              a.topk_weights = weights_.const_view();
            }),
            ErrorCode{0});
}

TEST_F(ReferenceArguments, AnotherShape_IsRefused) {
  const auto wrong = [](const Tensor& tensor) {
    ConstTensorView view = tensor.view();
    view.shape = {tensor.shape()[0] - 1, tensor.shape()[1]};
    return view;
  };
  EXPECT_EQ(rejection([&](ReferenceArgs& a) { a.router_logits = wrong(logits_); }),
            ErrorCode::kShape);
  EXPECT_EQ(rejection([&](ReferenceArgs& a) {
              a.topk_ids = wrong(ids_);
              a.topk_weights = weights_.const_view();
            }),
            ErrorCode::kShape);
  EXPECT_EQ(rejection([&](ReferenceArgs& a) {
              a.topk_ids = ids_.const_view();
              a.topk_weights = wrong(weights_);
            }),
            ErrorCode::kShape);
  EXPECT_EQ(rejection([&](ReferenceArgs& a) { a.router_input = few_.const_view(); }),
            ErrorCode::kShape);
  spec_.residual.intermediate_size = 8;
  EXPECT_EQ(rejection([&](ReferenceArgs& a) { a.residual_input = few_.const_view(); }),
            ErrorCode::kShape);
}

TEST_F(ReferenceArguments, AnotherTypeOrNoData_IsRefused) {
  EXPECT_EQ(rejection([](ReferenceArgs& a) { a.hidden.data = nullptr; }), ErrorCode::kNullPointer);
  EXPECT_EQ(rejection([&](ReferenceArgs& a) {
              a.topk_ids = weights_.const_view();
              a.topk_weights = weights_.const_view();
            }),
            ErrorCode::kDType);
}

TEST_F(ReferenceArguments, ANumberOfSlicesThatNoLayerHas_IsRefused) {
  for (const int32_t slices : {0, -1, (1 << 20) + 1, std::numeric_limits<int32_t>::max()}) {
    EXPECT_EQ(rejection([&](ReferenceArgs& a) { a.tp_size = slices; }), ErrorCode::kInvalidArgument)
        << slices;
  }
  // More than there are columns, so that some ranks have none.
  EXPECT_EQ(rejection([](ReferenceArgs& a) { a.tp_size = 100; }), ErrorCode{0});
}

TEST_F(ReferenceArguments, RoutingThatIsNotThere_IsRefused) {
  EXPECT_EQ(rejection([&](ReferenceArgs& a) { a.topk_weights = weights_.const_view(); }),
            ErrorCode::kInvalidArgument);
  spec_.has_gate = false;
  EXPECT_EQ(rejection([](ReferenceArgs&) {}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(rejection([&](ReferenceArgs& a) { a.topk_ids = ids_.const_view(); }),
            ErrorCode::kInvalidArgument);
  spec_.router = {.name = "sink_softmax", .score = RouterScore::kSigmoid};
  spec_.shared = {.mode = SharedMode::kRouterWeight, .intermediate_size = 8};
  EXPECT_EQ(rejection([&](ReferenceArgs& a) {
              a.topk_ids = ids_.const_view();
              a.topk_weights = weights_.const_view();
            }),
            ErrorCode::kInvalidArgument);
}

TEST_F(ReferenceArguments, TokenIds_AreChecked) {
  spec_.router.name = "hash";
  spec_.router.vocab_size = 7;
  const ConstTensorView ids{.data = ids_.as<int32_t>(), .dtype = DType::kI32, .shape = {kTokens}};
  EXPECT_EQ(rejection([&](ReferenceArgs& a) { a.token_ids = ids; }), ErrorCode{0});
  EXPECT_EQ(rejection([&](ReferenceArgs&) {}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(rejection([&](ReferenceArgs& a) {
              a.token_ids = ids;
              a.token_ids.dtype = DType::kF32;
            }),
            ErrorCode::kDType);
}

}  // namespace
}  // namespace conclave
