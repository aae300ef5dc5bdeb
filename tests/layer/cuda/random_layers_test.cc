// Compares layers in every form of numbers, with parts drawn at random, with float64 and with
// themselves. random_specs_test.cc has all parts, in plain numbers.

#include "device_layer.h"
#include "support/layer_parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace conclave {
namespace {

using testing::DeviceForward;
using testing::DeviceLayer;
using testing::NumberForm;
using testing::random_tensor;
using testing::same_bits;
using testing::SpecDraw;

constexpr uint32_t kLayers = 48;
constexpr int64_t kTokens = 21;

class CudaRandomLayer : public ::testing::WithParamInterface<uint32_t>,
                        public testing::CudaLayerTest {
 protected:
  CudaRandomLayer() {
    SpecDraw draw(GetParam());
    const std::vector<NumberForm> forms = testing::number_forms();
    form_ = forms[GetParam() % forms.size()];
    do {
      spec_ = testing::with_form(draw.draw(), form_);
      keep_plain_parts();
    } while (spec_.quant.activations != ActivationScale::kNone &&
             spec_.weight_on == WeightOn::kInput);
    hidden_ = random_tensor(testing::row_dtype(form_), kTokens, spec_.hidden_size, GetParam());
  }

  // With a latent projection, e4m3 rows would have codes without a known allowance;
  // random_specs_test.cc has the other parts.
  void keep_plain_parts() {
    spec_.latent = {};
    spec_.residual = {};
    const SharedMode mode = spec_.shared.mode;
    if (mode == SharedMode::kSoftmaxMix || mode == SharedMode::kRouterWeight ||
        mode == SharedMode::kFusedSlots) {
      spec_.shared.mode = SharedMode::kAdd;
      spec_.shared.count = 1;
      spec_.shared.slot_weight = 1;
      spec_.router = {};
    }
    if (spec_.shared.mode == SharedMode::kAverage) {
      spec_.num_zero_experts = 0;
      spec_.has_output_bias = false;
      spec_.top_k = std::min(spec_.top_k, spec_.num_experts);
    }
  }
  DeviceLayer layer(int64_t max_tokens, Determinism determinism = Determinism::kRepeatable) const {
    return DeviceLayer(spec_, {.max_tokens = max_tokens, .determinism = determinism});
  }
  std::string trace() const { return testing::parts_text(spec_) + ", " + form_.name; }

  NumberForm form_;
  MoeSpec spec_;
  Tensor hidden_;
};

TEST_P(CudaRandomLayer, Output_IsWithinTheBarOfFloat64) {
  SCOPED_TRACE(trace());
  DeviceLayer owned = layer(64);
  for (const int64_t tokens : {kTokens, int64_t{3}}) {
    std::vector<int64_t> rows;
    for (int64_t row = 0; row < tokens; ++row) rows.push_back(row);
    const Tensor hidden = testing::gather_rows(hidden_, rows);
    const testing::LayerOutput output =
        testing::run_device_layer(owned, hidden.view(), testing::row_dtype(form_));
    LayerResult result = output.result(hidden.const_view());
    result.code_ambiguity = testing::code_ambiguity(owned, tokens);
    const StageCheck check = check_against_reference(owned.host, spec_, *owned.source, result);
    EXPECT_EQ(check.routing_mismatches, 0);
    EXPECT_LE(check.worst_token_error, accuracy_bar(spec_.weight_dtype, DType::kBF16));
    testing::note_error(spec_, check.worst_token_error);
  }
}

TEST_P(CudaRandomLayer, BatchInvariant_ChunksAndSingleRowsHaveTheSameBits) {
  SCOPED_TRACE(trace());
  DeviceLayer owned = layer(8, Determinism::kBatchInvariant);
  DeviceForward whole(owned, hidden_.view(), DType::kF32);
  whole.enqueue();
  const Tensor expected = whole.out();
  for (const int64_t row : {int64_t{0}, int64_t{9}, kTokens - 1}) {
    const Tensor alone = testing::gather_rows(hidden_, {row});
    DeviceForward forward(owned, alone.view(), DType::kF32);
    forward.enqueue();
    EXPECT_TRUE(same_bits(forward.out(), testing::gather_rows(expected, {row}))) << row;
  }
}

TEST_P(CudaRandomLayer, InPlace_GivesTheBitsOfOutOfPlace) {
  SCOPED_TRACE(trace());
  const DType dtype = testing::row_dtype(form_);
  DeviceLayer owned = layer(8);
  DeviceForward forward(owned, hidden_.view(), dtype);
  forward.enqueue();
  const Tensor expected = forward.out();
  forward.args.out = forward.hidden().view();
  forward.enqueue();
  Tensor written(dtype, {kTokens, spec_.hidden_size});
  owned.queue.download(forward.hidden().const_view(), written.view());
  EXPECT_TRUE(same_bits(written, expected));
}

// Padding may hold anything, and so may rows beyond the live ones.
TEST_P(CudaRandomLayer, PaddingAndNumTokens_TouchNoOtherToken) {
  SCOPED_TRACE(trace());
  DeviceLayer owned = layer(64);
  DeviceForward plain(owned, hidden_.view(), DType::kF32);
  Tensor no_padding(DType::kBool, {kTokens});
  std::memset(no_padding.as<uint8_t>(), 1, kTokens);
  const DeviceTensor nobody = owned.queue.upload(no_padding.view());
  plain.args.padding_mask = nobody.const_view();
  plain.enqueue();
  const Tensor expected = plain.out();

  const int64_t live = kTokens - 2;
  Tensor spoiled = random_tensor(testing::row_dtype(form_), kTokens, spec_.hidden_size, GetParam());
  Tensor mask(DType::kBool, {kTokens});
  const size_t row_bytes = spoiled.size_bytes() / kTokens;
  for (int64_t row = 0; row < kTokens; ++row) {
    const bool padding = row % 4 == 1;
    mask.as<uint8_t>()[row] = padding ? 0 : 1;
    if (!padding && row < live) continue;
    std::memset(spoiled.as<std::byte>() + static_cast<size_t>(row) * row_bytes, 0xFF, row_bytes);
  }
  Tensor count(DType::kI64, {1});
  count.as<int64_t>()[0] = live;
  const DeviceTensor device_mask = owned.queue.upload(mask.view());
  const DeviceTensor device_count = owned.queue.upload(count.view());
  DeviceForward forward(owned, spoiled.view(), DType::kF32);
  forward.args.padding_mask = device_mask.const_view();
  forward.args.num_tokens = static_cast<const int64_t*>(device_count.const_view().data);
  forward.enqueue();
  const Tensor out = forward.out();
  for (int64_t row = 0; row < live; ++row) {
    const std::vector<std::byte> bytes = testing::row_bytes(out, row);
    if (row % 4 == 1) {
      EXPECT_TRUE(bytes == std::vector<std::byte>(bytes.size())) << row;
    } else {
      EXPECT_TRUE(bytes == testing::row_bytes(expected, row)) << row;
    }
  }
  const std::vector<std::byte> poison(testing::row_bytes(out, 0).size(), std::byte{0xFF});
  EXPECT_TRUE(testing::row_bytes(out, live) == poison);
}

INSTANTIATE_TEST_SUITE_P(Draws, CudaRandomLayer, ::testing::Range(0U, kLayers));

}  // namespace
}  // namespace conclave
