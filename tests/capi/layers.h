// A layer of the bundled model in both interfaces, and a call with everything that it may return.
#pragma once

#include "capi/handles.h"
#include "support/layer_fixture.h"

#include "conclave/checkpoint.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace conclave::testing {

class Layers : public ::testing::Test {
 protected:
  Layers()
      : cpp_checkpoint_(Checkpoint::open(kModel)),
        cpp_source_(cpp_checkpoint_.layer_source(0)),
        spec_(cpp_checkpoint_.layer(0).spec),
        cpp_layer_(MoeLayer::create(cpp_context_, spec_, *cpp_source_, {.max_tokens = 64})),
        context_(make_context()),
        checkpoint_(open_model()) {
    auto options = sized<conclave_layer_options>();
    options.max_tokens = 64;
    layer_ = make<conclave_layer>(&conclave_layer_create_from_checkpoint, context_.get(),
                                  checkpoint_.get(), int64_t{0}, &options, nullptr);
  }

  Context cpp_context_{ContextOptions{.num_threads = 2}};
  Checkpoint cpp_checkpoint_;
  std::unique_ptr<WeightSource> cpp_source_;
  MoeSpec spec_;
  MoeLayer cpp_layer_;
  Handle<conclave_context> context_;
  Handle<conclave_checkpoint> checkpoint_;
  Handle<conclave_layer> layer_;
};

// One call with everything that it may return.
struct Call {
  Call(const MoeSpec& spec, int64_t tokens, DType rows = DType::kBF16)
      : hidden(random_tensor(rows, tokens, spec.hidden_size, 3)),
        out(DType::kF32, {tokens, spec.hidden_size}),
        logits(DType::kF32, {tokens, num_logits(spec)}),
        ids(DType::kI32, {tokens, num_slots(spec)}),
        weights(DType::kF32, {tokens, num_slots(spec)}),
        load(static_cast<size_t>(spec.num_experts)) {
    views = {tensor_of(hidden.const_view()), tensor_of(out.const_view()),
             tensor_of(logits.const_view()), tensor_of(ids.const_view()),
             tensor_of(weights.const_view())};
  }

  conclave_forward_args args() {
    auto args = sized<conclave_forward_args>();
    args.hidden = &views[0];
    args.out = &views[1];
    args.captured_logits = &views[2];
    args.captured_ids = &views[3];
    args.captured_weights = &views[4];
    args.expert_load = load.data();
    args.expert_load_count = load.size();
    return args;
  }
  ForwardArgs cpp_args() {
    return {.hidden = hidden.const_view(),
            .out = out.view(),
            .captured_logits = logits.view(),
            .captured_ids = ids.view(),
            .captured_weights = weights.view(),
            .expert_load = load};
  }

  Tensor hidden, out, logits, ids, weights;
  std::vector<int64_t> load;
  std::vector<conclave_tensor> views;
};

inline void expect_same(const Call& found, const Call& expected) {
  EXPECT_TRUE(same_bits(found.out, expected.out));
  EXPECT_TRUE(same_bits(found.logits, expected.logits));
  EXPECT_TRUE(same_bits(found.ids, expected.ids));
  EXPECT_TRUE(same_bits(found.weights, expected.weights));
  EXPECT_EQ(found.load, expected.load);
}

}  // namespace conclave::testing
