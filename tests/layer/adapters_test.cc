// Adapters of experts against float64, and what they must not change.
#include "layer/coded_specs.h"
#include "layer/random_adapter.h"
#include "layer/split_specs.h"
#include "support/case_name.h"
#include "support/layer_parts.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace conclave::testing {
namespace {

// A layer with two adapters, and the oracle's view of them: token t has none, the first or the
// second in turn.
class AdaptedLayer {
 public:
  AdaptedLayer(const MoeSpec& spec, const AdapterChoice& first, const AdapterChoice& second,
               LayerOptions options = {}, ContextOptions context = {}) {
    options.max_adapter_rank = static_cast<int32_t>(std::max(first.rank, second.rank));
    owned_.emplace(make_layer(spec, options, std::move(context)));
    adapters_ = {random_adapter(spec, first, 900), random_adapter(spec, second, 9000)};
    for (const LoraAdapter& adapter : adapters_) ids_.push_back(layer().add_adapter(adapter));
  }

  MoeLayer& layer() { return owned_->layer; }
  const OwnedLayer& owned() const { return *owned_; }
  const std::vector<int32_t>& ids() const { return ids_; }

  double worst_error(const Tensor& hidden, DType out_dtype) {
    const int64_t tokens = hidden.shape()[0];
    const Tensor ids = id_tensor(tokens, {-1, ids_[0], ids_[1]});
    const Tensor places = id_tensor(tokens, {-1, 0, 1});
    const LayerOutput output =
        run_layer(layer(), hidden.view(), out_dtype, {.adapter_ids = ids.view()});
    LayerResult result = output.result(hidden.view());
    result.adapters = adapters_;
    result.adapter_ids = places.view();
    const StageCheck check =
        check_against_reference(*owned_->context, layer().spec(), *owned_->source, result);
    EXPECT_EQ(check.routing_mismatches, 0);
    // An oracle without the adapters must see a difference: they are not small.
    result.adapters = {};
    result.adapter_ids = {};
    const StageCheck without =
        check_against_reference(*owned_->context, layer().spec(), *owned_->source, result);
    EXPECT_TRUE(tokens == 1 || without.worst_token_error > 0.05);
    return check.worst_token_error;
  }

 private:
  std::optional<OwnedLayer> owned_;
  std::vector<LoraAdapter> adapters_;
  std::vector<int32_t> ids_;
};

double bar_of(const MoeSpec& spec, DType out) { return accuracy_bar(spec.weight_dtype, out); }

// Every instruction set and arithmetic, every activation.
TEST(Adapters, EveryKernelAndActivation_IsWithinTheBar) {
  for (const std::string& isa : usable_isas()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const ActivationSpec& activation : all_activations()) {
        MoeSpec spec = make_spec(5, 3, 70, 45, dtype);
        spec.activation = activation;
        spec.has_bias = true;
        SCOPED_TRACE(isa + " " + activation.name + " " + std::string(to_string(dtype)));
        AdaptedLayer layer(spec, {.rank = 8, .dtype = dtype},
                           {.rank = 3, .dtype = DType::kF16, .every = 2}, {}, {.isa = isa});
        const Tensor hidden = random_tensor(dtype, 20, 70, 3);
        EXPECT_LE(layer.worst_error(hidden, dtype), bar_of(spec, dtype));
      }
    }
  }
}

TEST(Adapters, EveryPartOfALayer_IsWithinTheBar) {
  for (const auto& [name, spec] : split_specs(23, DType::kF32)) {
    SCOPED_TRACE(name);
    AdaptedLayer layer(spec, {.rank = 16, .fused = true}, {.rank = 5, .dtype = DType::kBF16});
    const Tensor hidden = random_tensor(DType::kF32, 9, spec.hidden_size, 3);
    EXPECT_LE(layer.worst_error(hidden, DType::kF32), bar_of(spec, DType::kF32));
  }
  for (uint32_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const MoeSpec spec = SpecDraw(seed).draw();
    AdaptedLayer layer(spec, {.rank = 4, .dtype = spec.weight_dtype}, {.rank = 9, .every = 2},
                       {.max_tokens = 7});
    const Tensor hidden = random_tensor(spec.weight_dtype, 16, spec.hidden_size, seed);
    EXPECT_LE(layer.worst_error(hidden, spec.weight_dtype), bar_of(spec, spec.weight_dtype));
  }
}

TEST(Adapters, EveryFormatOfWeights_IsWithinTheBar) {
  for (const DType type : types_without_zeros()) {
    for (const bool quantises_rows : {false, true}) {
      QuantSpec quant{.weights = WeightScale::kChannel};
      if (quantises_rows) quant.activations = ActivationScale::kToken;
      const MoeSpec spec = coded_spec(type, 4, 2, 128, 96, quant);
      if (quantises_rows && !quant::format_of(type).takes(quant)) continue;
      SCOPED_TRACE(std::string(to_string(type)) + (quantises_rows ? " rows" : ""));
      AdaptedLayer layer(spec, {.rank = 16, .dtype = DType::kBF16}, {.rank = 8});
      for (const int64_t tokens : {2, 40}) {
        const Tensor hidden = random_tensor(DType::kF32, tokens, 128, 3);
        EXPECT_LE(layer.worst_error(hidden, DType::kF32), bar_of(spec, DType::kF32));
      }
    }
  }
}

TEST(Adapters, WeightsInPlace_GiveTheSameBits) {
  const MoeSpec spec = make_spec(4, 2, 72, 40, DType::kBF16);
  const auto source = make_synthetic_source(spec, 11);
  const Context context({.num_threads = 2});
  const Tensor hidden = random_tensor(DType::kF32, 300, 72, 3);
  const LoraAdapter adapter = random_adapter(spec, {.rank = 16});
  const auto run = [&](WeightUse use) {
    MoeLayer layer =
        MoeLayer::create(context, spec, *source, {.weights = use, .max_adapter_rank = 16});
    return run_layer(layer, hidden.view(), DType::kF32, {.adapter = layer.add_adapter(adapter)});
  };
  EXPECT_TRUE(same_bits(run(WeightUse::kInPlace).out, run(WeightUse::kPacked).out));
}

class AdapterRanks : public ::testing::TestWithParam<int64_t> {};
TEST_P(AdapterRanks, EveryRank_IsWithinTheBar) {
  const MoeSpec spec = make_spec(6, 2, 130, 100, DType::kF32);
  AdaptedLayer layer(spec, {.rank = GetParam()}, {.rank = GetParam(), .fused = true});
  const Tensor hidden = random_tensor(DType::kF32, 33, 130, 3);
  EXPECT_LE(layer.worst_error(hidden, DType::kF32), bar_of(spec, DType::kF32));
}
INSTANTIATE_TEST_SUITE_P(All, AdapterRanks, ::testing::Values(1, 8, 15, 16, 17, 64, 128, 512));

// Rows without an adapter, and the whole layer once it has none, keep every bit.
TEST(Adapters, TokensWithoutOne_KeepEveryBit) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    MoeSpec spec = make_spec(6, 3, 70, 45, dtype);
    spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 37};
    const OwnedLayer plain = make_layer(spec);
    AdaptedLayer adapted(spec, {.rank = 16}, {.rank = 8});
    const Tensor hidden = random_tensor(DType::kF32, 50, 70, 3);
    const LayerOutput expected = run_layer(plain.layer, hidden.view(), DType::kF32);
    const Tensor ids = id_tensor(50, {-1, adapted.ids()[0], -1, adapted.ids()[1]});
    const LayerOutput mixed =
        run_layer(adapted.layer(), hidden.view(), DType::kF32, {.adapter_ids = ids.view()});
    for (int64_t t = 0; t < 50; ++t) {
      EXPECT_EQ(row_bytes(mixed.out, t) == row_bytes(expected.out, t), t % 2 == 0) << t;
    }
    const LayerOutput none = run_layer(adapted.layer(), hidden.view(), DType::kF32);
    EXPECT_TRUE(same_bits(none.out, expected.out));
    for (const int32_t id : adapted.ids()) adapted.layer().remove_adapter(id);
    EXPECT_TRUE(adapted.layer().adapters().empty());
  }
}

// D2: neither the batch nor other adapters change a token's bits.
TEST(Adapters, ATokensBits_DoNotDependOnItsBatch) {
  for (const std::string& isa : usable_isas()) {
    SCOPED_TRACE(isa);
    const MoeSpec spec = make_spec(4, 2, 70, 45, DType::kBF16);
    AdaptedLayer adapted(spec, {.rank = 16, .dtype = DType::kBF16}, {.rank = 9}, {.max_tokens = 17},
                         {.isa = isa});
    const Tensor hidden = random_tensor(DType::kBF16, 61, 70, 3);
    const Tensor ids = id_tensor(61, {adapted.ids()[0], adapted.ids()[1], -1, adapted.ids()[0]});
    const LayerOutput all =
        run_layer(adapted.layer(), hidden.view(), DType::kF32, {.adapter_ids = ids.view()});
    for (const int64_t t : {0, 1, 2, 30, 60}) {
      const Tensor one = gather_rows(hidden, {t});
      const LayerOutput alone =
          run_layer(adapted.layer(), one.view(), DType::kF32, {.adapter = ids.as<int32_t>()[t]});
      EXPECT_EQ(row_bytes(alone.out, 0), row_bytes(all.out, t)) << t;
    }
  }
}

TEST(Adapters, ReplannedLayers_ShareThem) {
  const MoeSpec spec = make_spec(4, 2, 40, 24, DType::kF32);
  AdaptedLayer adapted(spec, {.rank = 8}, {.rank = 8});
  const MoeLayer replanned = adapted.layer().with_max_tokens(9);
  const Tensor hidden = random_tensor(DType::kF32, 20, 40, 3);
  const ForwardArgs args{.adapter = adapted.ids()[1]};
  EXPECT_TRUE(same_bits(run_layer(adapted.layer(), hidden.view(), DType::kF32, args).out,
                        run_layer(replanned, hidden.view(), DType::kF32, args).out));
  const auto infos = replanned.adapters();
  ASSERT_EQ(infos.size(), 2U);
  EXPECT_EQ(infos[1].id, 1);
  EXPECT_EQ(infos[1].max_rank, 8);
  EXPECT_EQ(infos[1].num_factors, 12);
  EXPECT_GE(infos[1].bytes, 4U * (3 * 40 + 3 * 24) * 8 * sizeof(float));
}

// Forwards run while adapters come and go: each sees a set as a whole.
TEST(Adapters, ComeAndGo_BesideForwards) {
  const MoeSpec spec = make_spec(4, 2, 40, 24, DType::kF32);
  const OwnedLayer owned = make_layer(spec, {.max_adapter_rank = 8}, {.num_threads = 1});
  MoeLayer layer = owned.layer.with_max_tokens(8);
  const LoraAdapter kept = random_adapter(spec, {.rank = 8});
  const int32_t id = layer.add_adapter(kept);
  const Tensor hidden = random_tensor(DType::kF32, 8, 40, 3);
  const LayerOutput expected = run_layer(layer, hidden.view(), DType::kF32, {.adapter = id});
  std::atomic<bool> done{false};
  std::atomic<int> forwards{0};
  std::thread worker([&] {
    Context own({.num_threads = 1});
    Workspace workspace(own, layer.workspace_bytes());
    while (!done.load()) {
      const LayerOutput output =
          run_layer(layer, hidden.view(), DType::kF32, {.adapter = id, .workspace = &workspace});
      EXPECT_TRUE(same_bits(output.out, expected.out));
      forwards.fetch_add(1);
    }
  });
  const LoraAdapter passing = random_adapter(spec, {.rank = 4}, 77);
  for (int i = 0; i < 30 || forwards.load() < 10; ++i) {
    layer.remove_adapter(layer.add_adapter(passing));
  }
  done.store(true);
  worker.join();
  EXPECT_EQ(layer.adapters().size(), 1U);
}

}  // namespace
}  // namespace conclave::testing
