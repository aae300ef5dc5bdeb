// Compares layers on a GPU, whose codes have zeros or a global scale, with float64.

#include "device_layer.h"
#include "quant/weight_format.h"

#include <gtest/gtest.h>

#include <string>

namespace conclave {
namespace {

using testing::CudaLayerTest;
using testing::DeviceLayer;
using testing::make_spec;
using testing::random_tensor;

void expect_accurate(DeviceLayer& owned, int64_t tokens) {
  SCOPED_TRACE(::testing::Message() << "T" << tokens);
  const MoeSpec& spec = owned.layer.spec();
  const Tensor hidden = random_tensor(DType::kBF16, tokens, spec.hidden_size, 3);
  const testing::LayerOutput output = testing::run_device_layer(owned, hidden.view(), DType::kBF16);
  LayerResult result = output.result(hidden.const_view());
  result.code_ambiguity = testing::code_ambiguity(owned, tokens);
  const StageCheck check = check_against_reference(owned.host, spec, *owned.source, result);
  EXPECT_EQ(check.routing_mismatches, 0);
  EXPECT_LE(check.worst_token_error, accuracy_bar(spec.weight_dtype, DType::kBF16));
}

class CudaCodeMeaning : public CudaLayerTest {
 protected:
  // In shapes that no block divides, with shared experts of slices of the routed ones' width.
  static void expect_every_format_accurate(const QuantSpec& form) {
    const auto catalog = quant::format_catalog();
    for (const quant::WeightFormat& format : catalog.rows()) {
      if (format.codes == nullptr || !format.takes(form)) continue;
      SCOPED_TRACE(std::string(format.name));
      MoeSpec odd = make_spec(5, 2, 127, 65, format.element);
      MoeSpec shared = make_spec(6, 2, 264, 136, format.element);
      shared.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 272};
      for (MoeSpec spec : {odd, shared}) {
        spec.quant = form;
        DeviceLayer owned(spec, {.max_tokens = 64});
        for (const int64_t tokens : {1, 8, 40}) expect_accurate(owned, tokens);
      }
    }
  }
};

TEST_F(CudaCodeMeaning, Zeros_AreWithinTheBar) {
  for (const WeightZero zeros : {WeightZero::kPoint, WeightZero::kOffset}) {
    expect_every_format_accurate({.weights = WeightScale::kTensor, .zeros = zeros});
    expect_every_format_accurate({.weights = WeightScale::kChannel, .zeros = zeros});
    expect_every_format_accurate({.weights = WeightScale::kBlock, .zeros = zeros});
    expect_every_format_accurate({.weights = WeightScale::kBlock,
                                  .block_rows = 1,
                                  .block_cols = 32,
                                  .zeros = zeros,
                                  .has_global_scale = true});
  }
}

TEST_F(CudaCodeMeaning, GlobalScales_AreWithinTheBarOnEveryKernel) {
  for (const QuantSpec& quant :
       {QuantSpec{.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup},
        QuantSpec{.weights = WeightScale::kChannel, .activations = ActivationScale::kToken},
        QuantSpec{.weights = WeightScale::kTensor}}) {
    QuantSpec with_global = quant;
    with_global.has_global_scale = true;
    expect_every_format_accurate(with_global);
  }
}

}  // namespace
}  // namespace conclave
