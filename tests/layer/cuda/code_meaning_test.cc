// Compares layers on a GPU, whose codes have zeros or a global scale, with float64.

#include "device_layer.h"
#include "quant/weight_format.h"

#include "conclave/tuning.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

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

// Codes, and their factors in each form that kernels for tensor cores read.
struct CodedForm {
  const char* name;
  DType dtype;
  QuantSpec quant;
};
std::vector<CodedForm> coded_forms() {
  const auto groups = [](int64_t columns, WeightZero zeros = WeightZero::kNone) {
    return QuantSpec{
        .weights = WeightScale::kBlock, .block_rows = 1, .block_cols = columns, .zeros = zeros};
  };
  return {{"int4, 32 columns", DType::kI4, groups(32)},
          {"int4, 64 columns, zero points", DType::kI4, groups(64, WeightZero::kPoint)},
          {"int4, 128 columns", DType::kI4, groups(128)},
          {"int4, 512 columns, zero points", DType::kI4, groups(512, WeightZero::kPoint)},
          {"int4, rows", DType::kI4, {.weights = WeightScale::kChannel}},
          {"e2m1, 16 columns", DType::kF4, groups(16)},
          {"e2m1, 32 columns", DType::kF4, groups(32)},
          {"int8, 32 columns, zero points", DType::kI8, groups(32, WeightZero::kPoint)},
          {"int8, rows", DType::kI8, {.weights = WeightScale::kChannel}},
          {"e4m3, blocks", DType::kF8E4M3, {.weights = WeightScale::kBlock}},
          {"e4m3, 64 columns", DType::kF8E4M3, groups(64)},
          {"e5m2, one scale", DType::kF8E5M2, {.weights = WeightScale::kTensor}}};
}

// A result does not depend on the tile, and so not on the batch that chooses it. Shapes that no
// tile, stage or group divides.
TEST_F(CudaCodeMeaning, EveryTileOfCodes_GivesTheSameBits) {
  constexpr const char* kKernel = "cuda.stream_codes_sm90";
  const Context context({.device = "cuda:0", .num_threads = 1});
  for (const CodedForm& form : coded_forms()) {
    for (MoeSpec spec :
         {make_spec(5, 2, 712, 328, form.dtype), make_spec(4, 2, 1160, 72, form.dtype)}) {
      spec.quant = form.quant;
      spec.has_bias = true;
      for (const int64_t tokens : {1, 37, 290}) {
        const Tensor hidden = random_tensor(DType::kBF16, tokens, spec.hidden_size, 5);
        std::vector<std::byte> first;
        int tiles = 0;
        for (const TuningEntry& entry :
             tuning_candidates(context, spec, {.max_tokens = tokens}, {}, tokens)) {
          if (entry.kernel != kKernel) continue;
          SCOPED_TRACE(std::string(form.name) + ", " + entry.tile + ", T" + std::to_string(tokens));
          auto table = std::make_shared<TuningTable>();
          table->set(entry);
          DeviceLayer owned(spec, {.max_tokens = tokens, .tuning = table});
          ASSERT_EQ(owned.layer.plan().ladder.back().tile, entry.tile);
          const Tensor out = testing::run_device_layer(owned, hidden.view(), DType::kBF16).out;
          const std::vector<std::byte> bytes(out.as<std::byte>(),
                                             out.as<std::byte>() + out.size_bytes());
          if (tiles++ == 0) {
            expect_accurate(owned, tokens);
            first = bytes;
          }
          EXPECT_EQ(bytes, first);
        }
        EXPECT_GE(tiles, 2) << form.name;
      }
    }
  }
}

}  // namespace
}  // namespace conclave
