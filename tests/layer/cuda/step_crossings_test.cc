// Adapters, refits and shared experts beside scales and offsets that a GPU holds as steps.
#include "device_layer.h"
#include "layer/random_adapter.h"
#include "layer/refit_sources.h"
#include "step_specs.h"

#include "conclave/refit.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

class CudaStepCrossings : public CudaLayerTest {};

const std::vector<int64_t> kTokens = {1, 8, 19, 70, 290};

// One source says the same in either form.
std::unique_ptr<WeightSource> source_of(const MoeSpec& spec, uint64_t seed = 7) {
  return make_synthetic_source(spec, seed);
}

// Other kernels round otherwise, and which one a layer has may depend on the form.
constexpr const char* kStreamed = "cuda.stream_codes_sm90";

// A layer with two adapters.
struct AdaptedLayer {
  AdaptedLayer(const MoeSpec& spec, std::unique_ptr<WeightSource> source, std::string kernel = "")
      : owned(spec, std::move(source),
              {.max_tokens = 512, .kernel = std::move(kernel), .max_adapter_rank = 16}),
        adapters{random_adapter(spec, {.rank = 16}, 900), random_adapter(spec, {.rank = 5}, 9000)} {
    for (const LoraAdapter& adapter : adapters) ids.push_back(owned.layer.add_adapter(adapter));
  }

  // Tokens have the first, none or the second in turn.
  Tensor run(const Tensor& hidden) {
    DeviceForward forward(owned, hidden.view(), DType::kF32);
    const DeviceTensor turn =
        owned.queue.upload(id_tensor(hidden.shape()[0], {ids[0], -1, ids[1]}).view());
    forward.args.adapter_ids = turn.const_view();
    forward.enqueue();
    return forward.out();
  }

  DeviceLayer owned;
  std::vector<LoraAdapter> adapters;
  std::vector<int32_t> ids;
};

Tensor rows(const MoeSpec& spec, int64_t tokens) {
  return random_tensor(DType::kBF16, tokens, spec.hidden_size, 5);
}

TEST_F(CudaStepCrossings, RowsWithAdapters_HaveTheBitsOfFloat32) {
  for (const MoeSpec& shape : step_shapes()) {
    const MoeSpec spec = in_steps(shape);
    AdaptedLayer narrow(spec, source_of(spec), kStreamed);
    AdaptedLayer wide(in_floats(spec), source_of(spec), kStreamed);
    for (const int64_t tokens : kTokens) {
      EXPECT_TRUE(same_bits(narrow.run(rows(spec, tokens)), wide.run(rows(spec, tokens))))
          << to_string(spec.weight_dtype) << " T" << tokens;
    }
  }
}

TEST_F(CudaStepCrossings, RowsWithoutAdapters_KeepEveryBit) {
  for (const MoeSpec& shape : step_shapes()) {
    for (const MoeSpec& spec : {in_steps(shape), in_floats(in_steps(shape))}) {
      AdaptedLayer adapted(spec, source_of(spec));
      DeviceLayer plain(spec, source_of(spec), {.max_tokens = 512});
      for (const int64_t tokens : kTokens) {
        const Tensor hidden = rows(spec, tokens);
        const Tensor mixed = adapted.run(hidden);
        const LayerOutput expected = run_device_layer(plain, hidden.view(), DType::kF32);
        for (int64_t t = 0; t < tokens; ++t) {
          ASSERT_EQ(row_bytes(mixed, t) == row_bytes(expected.out, t), t % 3 == 1)
              << to_string(spec.weight_dtype) << " " << t << " of " << tokens;
        }
      }
    }
  }
}

// Shared experts run as routed ones, of which each slice begins with a unit, or none holds steps.
TEST_F(CudaStepCrossings, SlicesOfSharedExperts_HaveTheBitsOfFloat32) {
  const MoeSpec lanes = in_steps(make_spec(4, 2, 520, 96, DType::kU4));
  for (MoeSpec spec :
       {lanes, in_steps(make_spec(4, 2, 520, 96, DType::kI8)), bytes_with_offsets(lanes)}) {
    for (const int64_t inner : {96, 256}) {
      spec.intermediate_size = inner;
      spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 2 * inner};
      const LayerOptions options{.max_tokens = 512, .kernel = kStreamed};
      DeviceLayer narrow(spec, source_of(spec), options);
      DeviceLayer wide(in_floats(spec), source_of(spec), options);
      for (const int64_t tokens : kTokens) {
        const Tensor hidden = rows(spec, tokens);
        EXPECT_TRUE(same_bits(run_device_layer(narrow, hidden.view(), DType::kF32).out,
                              run_device_layer(wide, hidden.view(), DType::kF32).out))
            << to_string(spec.weight_dtype) << " I" << inner << " T" << tokens;
      }
    }
  }
}

// New weights meet the adapters that the layer has, at the addresses that its kernels know.
TEST_F(CudaStepCrossings, RefitsBesideAdapters_GiveTheLayerOfTheNewWeights) {
  for (const MoeSpec& shape : step_shapes()) {
    const MoeSpec spec = in_steps(shape);
    AdaptedLayer old_layer(spec, source_of(spec));
    AdaptedLayer fresh(spec, source_of(spec, 8));
    const RefitScope half{.experts = {0, 2}};
    const auto second = source_of(spec, 8);
    const MergedSource merged(spec, *old_layer.owned.source, *second, half);
    AdaptedLayer mixed(spec, std::make_unique<MergedSource>(merged));
    for (const RefitMode mode : {RefitMode::kStaged, RefitMode::kStagedCopy, RefitMode::kInPlace}) {
      AdaptedLayer owned(spec, source_of(spec));
      const auto refit = [&](const RefitScope& scope, const WeightSource& source) {
        Refit change(owned.owned.layer, {.mode = mode, .scope = scope});
        change.stage(source);
        change.commit();
      };
      const auto expect_same = [&](AdaptedLayer& expected) {
        EXPECT_EQ(Refit::content_hash(owned.owned.layer),
                  Refit::content_hash(expected.owned.layer));
        for (const int64_t tokens : kTokens) {
          const Tensor hidden = rows(spec, tokens);
          EXPECT_TRUE(same_bits(owned.run(hidden), expected.run(hidden)))
              << to_string(spec.weight_dtype) << " T" << tokens << " mode "
              << static_cast<int>(mode);
        }
      };
      refit(half, merged);
      expect_same(mixed);
      refit({}, *second);
      expect_same(fresh);
    }
  }
}

}  // namespace
}  // namespace conclave::testing
