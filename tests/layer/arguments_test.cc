// A1: every wrong argument of forward and create gives a typed error and changes nothing.

#include "support/layer_fixture.h"

#include "conclave/comm.h"
#include "conclave/context.h"
#include "conclave/error.h"
#include "conclave/layer.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::make_layer;
using testing::make_spec;
using testing::OwnedLayer;
using testing::random_tensor;

constexpr int64_t kTokens = 4;
constexpr int64_t kHidden = 16;

class Arguments : public ::testing::Test {
 protected:
  Arguments()
      : owned_(make_layer(make_spec(5, 2, kHidden, 12, DType::kF32))),
        hidden_(random_tensor(DType::kF32, kTokens, kHidden, 1)),
        logits_(random_tensor(DType::kF32, kTokens, 5, 2)),
        ids_(DType::kI32, {kTokens, 2}),
        weights_(DType::kF32, {kTokens, 2}),
        out_(DType::kF32, {kTokens, kHidden}) {
    ids_.as<int32_t>()[1] = 1;
  }

  ForwardArgs valid() { return {.hidden = hidden_.view(), .out = out_.view()}; }

  // Returns the code that forward throws for valid arguments after `change`; also checks that the
  // layer still works afterwards.
  ErrorCode rejection(const std::function<void(ForwardArgs&)>& change) {
    ForwardArgs args = valid();
    change(args);
    const ErrorCode code = code_of([&] { owned_.layer.forward(args); });
    owned_.layer.forward(valid());
    return code;
  }

  OwnedLayer owned_;
  Tensor hidden_;
  Tensor logits_;
  Tensor ids_;
  Tensor weights_;
  Tensor out_;
};

TEST_F(Arguments, NullData_IsNamed) {
  EXPECT_EQ(rejection([](ForwardArgs& a) { a.hidden.data = nullptr; }), ErrorCode::kNullPointer);
  EXPECT_EQ(rejection([](ForwardArgs& a) { a.out.data = nullptr; }), ErrorCode::kNullPointer);
}

TEST_F(Arguments, WrongShapes_AreRejected) {
  EXPECT_EQ(rejection([](ForwardArgs& a) {
              a.hidden.shape = {kTokens, kHidden + 1};
            }),
            ErrorCode::kShape);
  EXPECT_EQ(rejection([](ForwardArgs& a) { a.hidden.shape = {kTokens * kHidden}; }),
            ErrorCode::kShape);
  EXPECT_EQ(rejection([](ForwardArgs& a) {
              a.out.shape = {kTokens - 1, kHidden};
            }),
            ErrorCode::kShape);
  EXPECT_EQ(rejection([&](ForwardArgs& a) {
              a.router_logits = logits_.view();
              a.router_logits.shape = {kTokens, 4};
            }),
            ErrorCode::kShape);
  EXPECT_EQ(rejection([&](ForwardArgs& a) {
              a.topk_ids = ids_.view();
              a.topk_weights = weights_.view();
              a.topk_weights.shape = {kTokens, 1};
            }),
            ErrorCode::kShape);
  std::vector<int64_t> load(4);
  EXPECT_EQ(rejection([&](ForwardArgs& a) { a.expert_load = load; }), ErrorCode::kShape);
  const Tensor mask(DType::kBool, {kTokens + 1});
  EXPECT_EQ(rejection([&](ForwardArgs& a) { a.padding_mask = mask.view(); }), ErrorCode::kShape);
}

TEST_F(Arguments, WrongTypes_AreRejected) {
  EXPECT_EQ(rejection([](ForwardArgs& a) { a.hidden.dtype = DType::kI32; }), ErrorCode::kDType);
  EXPECT_EQ(rejection([](ForwardArgs& a) { a.out.dtype = DType::kF64; }), ErrorCode::kDType);
  EXPECT_EQ(rejection([&](ForwardArgs& a) {
              a.topk_ids = ids_.view();
              a.topk_ids.dtype = DType::kF32;
              a.topk_weights = weights_.view();
            }),
            ErrorCode::kDType);
  EXPECT_EQ(rejection([&](ForwardArgs& a) {
              a.captured_ids = {
                  .data = weights_.as<float>(), .dtype = DType::kF32, .shape = {kTokens, 2}};
            }),
            ErrorCode::kDType);
}

TEST_F(Arguments, MisalignedOrOverlapping_AreRejected) {
  EXPECT_EQ(rejection([](ForwardArgs& a) {
              a.hidden.data = static_cast<const std::byte*>(a.hidden.data) + 2;
            }),
            ErrorCode::kMisaligned);
  EXPECT_EQ(rejection([](ForwardArgs& a) { a.hidden.row_stride = kHidden - 1; }),
            ErrorCode::kStride);
  EXPECT_EQ(rejection([](ForwardArgs& a) { a.out.row_stride = -kHidden; }), ErrorCode::kStride);
  std::vector<float> both((kTokens + 1) * kHidden);
  EXPECT_EQ(rejection([&](ForwardArgs& a) {
              a.hidden.data = both.data();
              a.out.data = both.data() + kHidden;
            }),
            ErrorCode::kOverlap);
  EXPECT_EQ(rejection([&](ForwardArgs& a) {
              a.captured_weights = {
                  .data = out_.as<float>(), .dtype = DType::kF32, .shape = {kTokens, 2}};
            }),
            ErrorCode::kOverlap);
}

// These are read after the first rows are written: by later chunks, and the mask by the last stage.
TEST_F(Arguments, OutputOverTokenIdsMaskOrLoad_IsRejected) {
  const auto at_out = [&](DType dtype) -> ConstTensorView {
    return {.data = out_.as<float>() + 1, .dtype = dtype, .shape = {kTokens}};
  };
  EXPECT_EQ(rejection([&](ForwardArgs& a) { a.token_ids = at_out(DType::kI32); }),
            ErrorCode::kOverlap);
  EXPECT_EQ(rejection([&](ForwardArgs& a) { a.padding_mask = at_out(DType::kBool); }),
            ErrorCode::kOverlap);
  EXPECT_EQ(rejection([&](ForwardArgs& a) {
              void* const data = out_.as<float>();
              a.expert_load = {static_cast<int64_t*>(data), 5};
            }),
            ErrorCode::kOverlap);
  EXPECT_EQ(rejection([&](ForwardArgs& a) {
              void* const data = hidden_.as<float>();
              a.expert_load = {static_cast<int64_t*>(data), 5};
            }),
            ErrorCode::kOverlap);
}

TEST_F(Arguments, StrideBeyondTheAddressSpace_IsRejected) {
  for (const int64_t stride : {std::numeric_limits<int64_t>::max(), int64_t{1} << 61}) {
    EXPECT_EQ(rejection([&](ForwardArgs& a) { a.hidden.row_stride = stride; }), ErrorCode::kStride);
    EXPECT_EQ(rejection([&](ForwardArgs& a) { a.out.row_stride = stride; }), ErrorCode::kStride);
  }
}

TEST_F(Arguments, RoutingGivenTwiceOrHalf_IsRejected) {
  EXPECT_EQ(rejection([&](ForwardArgs& a) { a.topk_weights = weights_.view(); }),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(rejection([&](ForwardArgs& a) {
              a.topk_ids = ids_.view();
              a.topk_weights = weights_.view();
              a.router_logits = logits_.view();
            }),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(rejection([&](ForwardArgs& a) {
              a.router_logits = logits_.view();
              a.router_input = hidden_.view();
            }),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(rejection([&](ForwardArgs& a) { a.shared_out = out_.view(); }),
            ErrorCode::kInvalidArgument);
}

TEST_F(Arguments, NumTokensOutOfRange_IsRejected) {
  for (const int64_t count : {int64_t{-1}, kTokens + 1}) {
    EXPECT_EQ(rejection([&](ForwardArgs& a) { a.num_tokens = &count; }),
              ErrorCode::kInvalidArgument);
  }
}

TEST_F(Arguments, TokensOfRanksThatCannotBe_AreRejected) {
  const auto rejected = [&](std::vector<int64_t> tokens) {
    return rejection([tokens = std::move(tokens)](ForwardArgs& a) { a.rank_tokens = tokens; });
  };
  EXPECT_EQ(rejected({kTokens}), ErrorCode{0}) << "one rank with these rows";
  EXPECT_EQ(rejected({kTokens, kTokens}), ErrorCode::kShape);
  EXPECT_EQ(rejected({kTokens - 1}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(rejected({-1}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(rejected({std::numeric_limits<int64_t>::max()}), ErrorCode::kInvalidArgument);
}

TEST_F(Arguments, SmallWorkspace_IsRejectedBeforeAnythingIsWritten) {
  for (const size_t bytes :
       {size_t{0}, owned_.layer.workspace_bytes() / 2, owned_.layer.workspace_bytes() - 1}) {
    std::vector<std::byte> memory(bytes + 64);
    auto* aligned =
        reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    Workspace workspace(std::span(aligned, bytes));
    EXPECT_EQ(rejection([&](ForwardArgs& a) { a.workspace = &workspace; }),
              ErrorCode::kWorkspaceTooSmall);
  }
}

TEST_F(Arguments, WorkspaceMemory_MustBeAligned) {
  alignas(64) std::byte memory[128];
  EXPECT_EQ(code_of([&] { Workspace(std::span(memory + 8, 100)); }), ErrorCode::kMisaligned);
  EXPECT_EQ(code_of([&] { Workspace(std::span<std::byte>(static_cast<std::byte*>(nullptr), 8)); }),
            ErrorCode::kNullPointer);
}

TEST(LayerWithoutGate, ForwardWithoutRouting_SaysWhatToGive) {
  MoeSpec spec = make_spec(5, 2, 16, 12, DType::kF32);
  spec.has_gate = false;
  const OwnedLayer owned = make_layer(spec);
  const Tensor hidden = random_tensor(DType::kF32, 2, 16, 1);
  Tensor out(DType::kF32, {2, 16});
  EXPECT_EQ(code_of([&] { owned.layer.forward({.hidden = hidden.view(), .out = out.view()}); }),
            ErrorCode::kInvalidArgument);
}

class Create : public ::testing::Test {
 protected:
  ErrorCode rejection(const MoeSpec& spec, const LayerOptions& options = {},
                      const ParallelSpec& parallel = {}) {
    const auto source = make_synthetic_source(make_spec(5, 2, 16, 12, DType::kBF16), 1);
    return code_of([&] { MoeLayer::create(context_, spec, *source, options, parallel); });
  }
  Context context_{ContextOptions{.num_threads = 1}};
  MoeSpec spec_ = make_spec(5, 2, 16, 12, DType::kBF16);
};

TEST_F(Create, SourceThatDoesNotFit_IsNamed) {
  EXPECT_EQ(rejection(spec_), ErrorCode{0});
  EXPECT_EQ(rejection(make_spec(6, 2, 16, 12, DType::kBF16)), ErrorCode::kTensorShape);
  EXPECT_EQ(rejection(make_spec(5, 2, 17, 12, DType::kBF16)), ErrorCode::kTensorShape);
  EXPECT_EQ(rejection(make_spec(5, 2, 16, 12, DType::kF32)), ErrorCode::kTensorDType);
  MoeSpec shared = spec_;
  shared.shared = {.mode = SharedMode::kAdd, .intermediate_size = 4};
  EXPECT_EQ(rejection(shared), ErrorCode::kTensorMissing);
}

TEST_F(Create, UnknownNames_ListTheKnownOnes) {
  MoeSpec router = spec_;
  router.router.name = "nothing";
  EXPECT_EQ(rejection(router), ErrorCode::kUnknownName);
  MoeSpec activation = spec_;
  activation.activation.name = "nothing";
  EXPECT_EQ(rejection(activation), ErrorCode::kUnknownName);
  EXPECT_EQ(rejection(spec_, {.kernel = "cpu.nothing"}), ErrorCode::kUnknownName);
  EXPECT_EQ(rejection(spec_, {.arithmetic = "nothing"}), ErrorCode::kUnknownName);
}

TEST_F(Create, ImpossibleOptions_AreRejected) {
  EXPECT_EQ(rejection(spec_, {.max_tokens = 0}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(rejection(spec_, {.max_tokens = int64_t{1} << 62}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(rejection(spec_, {}, {.ep_size = 2}), ErrorCode::kUnsupported) << "no communicator";
  EXPECT_EQ(rejection(spec_, {}, {.ep_size = 0}), ErrorCode::kInvalidArgument);
  MoeSpec zero = spec_;
  zero.num_experts = 0;
  EXPECT_EQ(rejection(zero), ErrorCode::kInvalidArgument);
}

// From so many tokens on no machine has the memory that a call could need; for the last of them it
// does not fit 63 bits where experts are many.
TEST_F(Create, WorkspaceBeyondMemory_IsATypedErrorAtOnce) {
  const auto source = make_synthetic_source(spec_, 1);
  const auto group = make_local_group({.num_ranks = 2});
  const Context with_ranks({.communicator = group[0].get()});
  for (const EpTransport transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
    for (const int64_t tokens : {int64_t{1} << 36, (int64_t{1} << 40) - 1, int64_t{1} << 40}) {
      const LayerOptions options{.max_tokens = tokens, .transport = transport};
      EXPECT_EQ(rejection(spec_, options), ErrorCode::kOutOfMemory) << tokens;
      try {
        MoeLayer::create(with_ranks, spec_, *source, options, {.ep_size = 2});
        ADD_FAILURE() << "planned for " << tokens << " tokens";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory) << error.what();
        EXPECT_EQ(error.detail().tensor, "LayerOptions.max_tokens");
        EXPECT_EQ(error.detail().found.find(std::to_string(tokens)), 0U) << error.what();
        EXPECT_NE(error.detail().limit.find("bytes of memory"), std::string::npos) << error.what();
      }
    }
  }
}

TEST_F(Create, ALayerThatCannotPlanForMore_ServesOn) {
  const auto source = make_synthetic_source(spec_, 1);
  const MoeLayer layer = MoeLayer::create(context_, spec_, *source, {.max_tokens = 2});
  EXPECT_EQ(code_of([&] { layer.with_max_tokens(int64_t{1} << 36); }), ErrorCode::kOutOfMemory);
  EXPECT_EQ(code_of([&] { layer.with_max_tokens(int64_t{1} << 41); }), ErrorCode::kInvalidArgument);
  const Tensor hidden = random_tensor(DType::kF32, 5, 16, 1);
  Tensor out(DType::kF32, {5, 16});
  layer.forward({.hidden = hidden.view(), .out = out.view()});
  // A plan alone asks for no memory: it may be one for another machine.
  EXPECT_GT(make_plan(context_, spec_, {.max_tokens = int64_t{1} << 36}).workspace_bytes,
            size_t{1} << 40);
}

}  // namespace
}  // namespace conclave
