// Adapters of experts on a GPU against float64, and what they must not change.
#include "adapted_layer.h"
#include "coded_forms.h"
#include "core/weight_types.h"
#include "cuda/stream.h"
#include "device_layer.h"
#include "layer/coded_specs.h"
#include "layer/random_adapter.h"
#include "layer/split_specs.h"
#include "support/layer_parts.h"

#include "conclave/format.h"
#include "conclave/interop/cuda.h"
#include "conclave/refit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cuda_runtime_api.h>
#include <thread>

namespace conclave::testing {
namespace {

class CudaAdapters : public CudaLayerTest {};

const std::vector<int64_t> kTokens = {1, 5, 40, 300};

TEST_F(CudaAdapters, EveryTypeAndActivation_IsWithinTheBar) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const ActivationSpec& activation : all_activations()) {
      MoeSpec spec = make_spec(5, 3, 72, 45, dtype);
      spec.activation = activation;
      spec.has_bias = true;
      SCOPED_TRACE(activation.name + " " + std::string(to_string(dtype)));
      AdaptedLayer layer(spec, {.rank = 8, .dtype = dtype},
                         {.rank = 3, .dtype = DType::kF16, .every = 2}, {.max_tokens = 512});
      for (const int64_t tokens : kTokens) {
        EXPECT_LE(layer.worst_error(tokens), bar_of(spec)) << "T" << tokens;
      }
    }
  }
}

TEST_F(CudaAdapters, EveryPartOfALayer_IsWithinTheBar) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (auto [name, spec] : split_specs(23, dtype)) {
      // Over 24 columns roundings to bf16 alone may take a token beyond the bar (docs/numerics.md).
      if (dtype == DType::kBF16 && spec.latent.has_norm) {
        spec = make_spec(5, 3, 296, 168, dtype);
        spec.latent = {.size = 264, .has_norm = true};
      }
      SCOPED_TRACE(name + " " + std::string(to_string(dtype)));
      AdaptedLayer layer(spec, {.rank = 16, .fused = true}, {.rank = 5, .dtype = DType::kBF16});
      for (const int64_t tokens : {3, 50}) {
        EXPECT_LE(layer.worst_error(tokens), bar_of(spec)) << "T" << tokens;
      }
    }
  }
  for (uint32_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    SpecDraw draw(seed);
    MoeSpec spec = draw.draw();
    if (spec.shared.mode != SharedMode::kNone && seed % 2 == 0) {
      spec.shared.intermediate_size = spec.intermediate_size * draw.number(1, 2);
      spec.shared.activation = {.name = ""};
      spec.shared.has_bias = false;
    }
    AdaptedLayer layer(spec, {.rank = 4, .dtype = spec.weight_dtype}, {.rank = 9, .every = 2},
                       {.max_tokens = 17});
    EXPECT_LE(layer.worst_error(40), bar_of(spec));
  }
}

TEST_F(CudaAdapters, EveryFormatOfWeights_IsWithinTheBar) {
  for (const NumberForm& form : number_forms()) {
    SCOPED_TRACE(form.name);
    const MoeSpec spec = with_form(make_spec(6, 2, 256, 128, form.dtype), form);
    AdaptedLayer layer(spec, {.rank = 16, .dtype = DType::kBF16}, {.rank = 8}, {.max_tokens = 512});
    for (const int64_t tokens : kTokens) {
      EXPECT_LE(layer.worst_error(tokens), bar_of(spec)) << "T" << tokens;
    }
  }
}

// Forms of codes that kernels tell apart, and those that have names: rows of bytes among them.
std::vector<CodedForm> every_form() {
  std::vector<CodedForm> forms = coded_forms();
  static const std::vector<WeightForm> named = weight_forms();
  for (const WeightForm& form : named) {
    if (!is_plain(form.dtype)) forms.push_back({form.name.data(), form.dtype, form.quant});
  }
  return forms;
}

// A layer with adapters, or nothing for forms that a GPU lacks with or without them.
std::optional<AdaptedLayer> adapted_layer(const MoeSpec& spec, const LayerOptions& options) {
  std::optional<AdaptedLayer> layer;
  if (code_of([&] { DeviceLayer{spec}; }) == ErrorCode::kUnsupported) return layer;
  layer.emplace(spec, AdapterChoice{.rank = 16, .dtype = DType::kBF16}, AdapterChoice{.rank = 8},
                options);
  return layer;
}

TEST_F(CudaAdapters, EveryFormOfCodes_IsWithinTheBar) {
  for (const CodedForm& form : every_form()) {
    SCOPED_TRACE(form.name);
    const MoeSpec spec = coded_spec(form.dtype, 5, 2, 256, 128, form.quant);
    std::optional<AdaptedLayer> layer = adapted_layer(spec, {.max_tokens = 512});
    if (!layer) continue;
    for (const int64_t tokens : kTokens) {
      EXPECT_LE(layer->worst_error(tokens), bar_of(spec)) << "T" << tokens;
    }
  }
}

TEST_F(CudaAdapters, OddShapesOfCodes_AreWithinTheBar) {
  for (const CodedForm& form : every_form()) {
    SCOPED_TRACE(form.name);
    MoeSpec spec = coded_spec(form.dtype, 6, 2, 264, 136, form.quant);
    spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 272};
    std::optional<AdaptedLayer> layer = adapted_layer(spec, {});
    if (!layer) continue;
    for (const int64_t tokens : {3, 40}) {
      EXPECT_LE(layer->worst_error(tokens), bar_of(spec)) << "T" << tokens;
    }
  }
}

TEST_F(CudaAdapters, TokensWithoutOneBesideCodes_KeepEveryBit) {
  for (const CodedForm& form : every_form()) {
    SCOPED_TRACE(form.name);
    const MoeSpec spec = coded_spec(form.dtype, 5, 2, 256, 128, form.quant);
    std::optional<AdaptedLayer> layer = adapted_layer(spec, {.max_tokens = 512});
    if (!layer) continue;
    DeviceLayer plain(spec, {.max_tokens = 512});
    for (const int64_t tokens : kTokens) {
      const Tensor hidden = random_tensor(DType::kBF16, tokens, 256, 3);
      const LayerOutput expected = run_device_layer(plain, hidden.view(), DType::kBF16);
      const Tensor ids = id_tensor(tokens, {-1, layer->ids()[0]});
      const LayerOutput mixed = layer->run(hidden, ids, DType::kBF16);
      for (int64_t t = 0; t < tokens; ++t) {
        ASSERT_EQ(row_bytes(mixed.out, t) == row_bytes(expected.out, t), t % 2 == 0)
            << t << " of " << tokens;
      }
    }
  }
}

// One expert has all rows, so that tiles have one row less than they hold, as many, and one more:
// every tile of the ladder leads to a tile for rows with adapters, and each gives the same bits.
TEST_F(CudaAdapters, EveryTileOfCodes_GivesTheSameBits) {
  const Context context({.device = "cuda:0", .num_threads = 1});
  for (const CodedForm& form : coded_forms()) {
    SCOPED_TRACE(form.name);
    const MoeSpec spec = coded_spec(form.dtype, 1, 1, 320, 288, form.quant);
    if (code_of([&] { DeviceLayer{spec}; }) == ErrorCode::kUnsupported) continue;
    for (const int64_t tokens : {15, 17, 32, 65}) {
      const Tensor hidden = random_tensor(DType::kBF16, tokens, 320, 3);
      std::vector<LayerOutput> first;
      for (const TuningEntry& entry :
           tuning_candidates(context, spec, {.max_tokens = tokens}, {}, tokens)) {
        if (entry.kernel != "cuda.stream_codes_sm90") continue;
        SCOPED_TRACE(entry.tile + ", T" + std::to_string(tokens));
        auto table = std::make_shared<TuningTable>();
        table->set(entry);
        AdaptedLayer layer(spec, {.rank = 16, .dtype = DType::kBF16}, {.rank = 128},
                           {.max_tokens = tokens, .tuning = table});
        ASSERT_EQ(layer.layer().plan().ladder.back().tile, entry.tile);
        const std::vector<int32_t> turn = {layer.ids()[0], -1, layer.ids()[1]};
        std::vector<LayerOutput> own;
        own.push_back(layer.run(hidden, id_tensor(tokens, turn)));
        own.push_back(layer.run(hidden, layer.ids()[0]));
        if (first.empty()) {
          EXPECT_LE(layer.worst_error(tokens), bar_of(spec));
          first = std::move(own);
          continue;
        }
        EXPECT_TRUE(same_bits(own[0].out, first[0].out));
        EXPECT_TRUE(same_bits(own[1].out, first[1].out));
      }
      EXPECT_FALSE(first.empty());
    }
  }
}

// Few of many experts have rows, most of them one.
TEST_F(CudaAdapters, IdleExpertsOfCodes_AreWithinTheBar) {
  for (const CodedForm& form : coded_forms()) {
    SCOPED_TRACE(form.name);
    const MoeSpec spec = coded_spec(form.dtype, 40, 3, 256, 128, form.quant);
    std::optional<AdaptedLayer> layer = adapted_layer(spec, {});
    if (!layer) continue;
    for (const int64_t tokens : {2, 9}) {
      EXPECT_LE(layer->worst_error(tokens), bar_of(spec)) << "T" << tokens;
      const Tensor hidden = random_tensor(DType::kBF16, tokens, 256, 3);
      const int32_t id = layer->ids()[0];
      EXPECT_TRUE(
          same_bits(layer->run(hidden, id).out, layer->run(hidden, id_tensor(tokens, {id})).out));
    }
  }
}

TEST_F(CudaAdapters, EveryRank_IsWithinTheBar) {
  for (const int64_t rank : {1, 8, 15, 16, 17, 64, 128, 512}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(rank);
      const MoeSpec spec = make_spec(6, 2, 130, 100, dtype);
      AdaptedLayer layer(spec, {.rank = rank, .dtype = dtype}, {.rank = rank, .fused = true});
      EXPECT_LE(layer.worst_error(33), bar_of(spec));
    }
  }
}

// Warps share columns of A in steps, of which these rows have several and a part of one; experts
// have several tiles of rows, whose adapters are those of neither all nor none of them.
TEST_F(CudaAdapters, WideRowsOfManyTokens_AreWithinTheBar) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
    MoeSpec spec = make_spec(3, 2, 2056, 1592, dtype);
    if (dtype == DType::kF8E4M3) {
      spec.quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
    }
    SCOPED_TRACE(std::string(to_string(dtype)));
    AdaptedLayer layer(spec, {.rank = 24, .dtype = DType::kBF16}, {.rank = 9}, {.max_tokens = 512});
    for (const int64_t tokens : {1, 20, 210}) {
      EXPECT_LE(layer.worst_error(tokens), bar_of(spec)) << "T" << tokens;
    }
  }
}

// Rows without an adapter keep every bit, whichever kernel the layer has for as many tokens; so
// does the whole layer in calls that name none, and once it has none.
TEST_F(CudaAdapters, TokensWithoutOne_KeepEveryBit) {
  for (const NumberForm& form : number_forms()) {
    MoeSpec spec = with_form(make_spec(12, 3, 256, 128, form.dtype), form);
    if (form.dtype == DType::kBF16) {
      spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 37};
    }
    SCOPED_TRACE(form.name);
    DeviceLayer plain(spec, {.max_tokens = 2048});
    AdaptedLayer adapted(spec, {.rank = 16}, {.rank = 8}, {.max_tokens = 2048});
    for (const int64_t tokens : {1, 2, 7, 8, 9, 33, 150, 700, 2000}) {
      SCOPED_TRACE(tokens);
      const Tensor hidden = random_tensor(rows_of(spec), tokens, 256, 3);
      const LayerOutput expected = run_device_layer(plain, hidden.view(), DType::kBF16);
      const Tensor ids = id_tensor(tokens, {-1, adapted.ids()[0], -1, adapted.ids()[1]});
      const LayerOutput mixed = adapted.run(hidden, ids, DType::kBF16);
      for (int64_t t = 0; t < tokens; ++t) {
        ASSERT_EQ(row_bytes(mixed.out, t) == row_bytes(expected.out, t), t % 2 == 0) << t;
      }
      const LayerOutput none = adapted.run(hidden, id_tensor(tokens, {-1}), DType::kBF16);
      EXPECT_TRUE(same_bits(none.out, expected.out));
      EXPECT_TRUE(same_bits(run_device_layer(adapted.owned(), hidden.view(), DType::kBF16).out,
                            expected.out));
    }
    for (const int32_t id : adapted.ids()) adapted.layer().remove_adapter(id);
    EXPECT_TRUE(adapted.layer().adapters().empty());
    EXPECT_EQ(adapted.layer().status().skipped_ids, 0);
  }
}

// Finite factors that bf16 does not hold may make their own tokens infinite, and no others.
TEST_F(CudaAdapters, FactorsBeyondBf16_TouchNoOtherToken) {
  for (const DType dtype : {DType::kBF16, DType::kF8E4M3}) {
    MoeSpec spec = make_spec(3, 2, 128, 64, dtype);
    if (dtype == DType::kF8E4M3) {
      spec.quant = {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken};
    }
    AdaptedLayer adapted(spec, {.rank = 16}, {.rank = 8}, {.max_tokens = 512});
    const LoraAdapter huge = random_adapter(spec, {.rank = 8}, 77);
    for (const LoraFactors& factors : huge.factors) {
      auto* const b = static_cast<float*>(const_cast<void*>(factors.b.data));
      std::fill_n(b, factors.b.shape.num_elements(), 3.4e38F);
    }
    const int32_t id = adapted.layer().add_adapter(huge);
    const std::vector<int32_t>& ids = adapted.ids();
    for (const int64_t tokens : kTokens) {
      const Tensor hidden = random_tensor(DType::kBF16, tokens, 128, 3);
      const LayerOutput beside = adapted.run(hidden, id_tensor(tokens, {id, ids[0], -1, ids[1]}));
      const LayerOutput without = adapted.run(hidden, id_tensor(tokens, {-1, ids[0], -1, ids[1]}));
      for (int64_t t = 0; t < tokens; ++t) {
        ASSERT_EQ(row_bytes(beside.out, t) == row_bytes(without.out, t), t % 4 != 0) << t;
      }
    }
  }
}

TEST_F(CudaAdapters, OneForAll_IsTheSameAsItsIds) {
  for (const NumberForm& form : number_forms()) {
    SCOPED_TRACE(form.name);
    const MoeSpec spec = with_form(make_spec(6, 2, 256, 128, form.dtype), form);
    AdaptedLayer adapted(spec, {.rank = 16}, {.rank = 8}, {.max_tokens = 512});
    for (const int64_t tokens : kTokens) {
      const Tensor hidden = random_tensor(rows_of(spec), tokens, 256, 3);
      const int32_t id = adapted.ids()[1];
      Tensor wide(DType::kI64, {tokens});
      for (int64_t t = 0; t < tokens; ++t) wide.as<int64_t>()[t] = id;
      const LayerOutput one = adapted.run(hidden, id);
      EXPECT_TRUE(same_bits(one.out, adapted.run(hidden, id_tensor(tokens, {id})).out));
      EXPECT_TRUE(same_bits(one.out, adapted.run(hidden, wide).out));
    }
  }
}

TEST_F(CudaAdapters, ATokensBits_DoNotDependOnItsBatch) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
    MoeSpec spec = make_spec(4, 2, 128, 64, dtype);
    if (dtype == DType::kF8E4M3) spec.quant = {.weights = WeightScale::kChannel};
    AdaptedLayer adapted(spec, {.rank = 16, .dtype = DType::kBF16}, {.rank = 9},
                         {.max_tokens = 170, .determinism = Determinism::kBatchInvariant});
    const Tensor hidden = random_tensor(rows_of(spec), 300, 128, 3);
    const std::vector<int32_t> turn = {adapted.ids()[0], adapted.ids()[1], -1, adapted.ids()[0]};
    const LayerOutput all = adapted.run(hidden, id_tensor(300, turn));
    for (const int64_t t : {0, 1, 2, 30, 299}) {
      const LayerOutput alone =
          adapted.run(gather_rows(hidden, {t}), turn[static_cast<size_t>(t) % 4]);
      EXPECT_EQ(row_bytes(alone.out, 0), row_bytes(all.out, t)) << t;
    }
  }
}

TEST_F(CudaAdapters, UnknownIds_AreCountedAndHaveNone) {
  const MoeSpec spec = make_spec(6, 2, 128, 64, DType::kBF16);
  AdaptedLayer adapted(spec, {.rank = 8}, {.rank = 8});
  const Tensor hidden = random_tensor(DType::kBF16, 40, 128, 3);
  const LayerOutput expected = run_device_layer(adapted.owned(), hidden.view(), DType::kF32);
  const LayerOutput unknown = adapted.run(hidden, id_tensor(40, {-2, -1, 7, 1 << 30}));
  EXPECT_TRUE(same_bits(unknown.out, expected.out));
  EXPECT_EQ(adapted.layer().status().skipped_ids, 30);
  EXPECT_EQ(code_of([&] { adapted.run(hidden, 7); }), ErrorCode::kInvalidArgument);
  DeviceLayer plain(spec);
  DeviceForward forward(plain, hidden.view(), DType::kF32);
  const DeviceTensor ids = plain.queue.upload(id_tensor(40, {-1}).view());
  forward.args.adapter_ids = ids.const_view();
  EXPECT_EQ(code_of([&] { forward.enqueue(); }), ErrorCode::kState);
  EXPECT_EQ(code_of([&] { plain.layer.add_adapter(adapted.adapters()[0]); }), ErrorCode::kState);
}

// Slices of two ranks add up to the whole.
TEST_F(CudaAdapters, TensorParallelSlices_AddUp) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    MoeSpec spec = make_spec(4, 2, 64, 48, dtype);
    spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 96};
    const AdapterChoice first{.rank = 8, .dtype = dtype};
    const AdapterChoice second{.rank = 16};
    AdaptedLayer whole(spec, first, second);
    const Tensor hidden = random_tensor(dtype, 30, 64, 3);
    const Tensor ids = id_tensor(30, {-1, whole.ids()[0], whole.ids()[1]});
    const Tensor expected = whole.run(hidden, ids).out;
    std::vector<double> sums(30 * 64, 0.0);
    for (int32_t rank = 0; rank < 2; ++rank) {
      AdaptedLayer slice(spec, first, second, {},
                         {.tp_size = 2, .tp_rank = rank, .reduce = Reduce::kPartial});
      const Tensor part = slice.run(hidden, ids).out;
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += part.as<float>()[i];
    }
    double difference = 0;
    double size = 0;
    for (size_t i = 0; i < sums.size(); ++i) {
      const double value = expected.as<float>()[i];
      difference += (sums[i] - value) * (sums[i] - value);
      size += value * value;
    }
    EXPECT_LE(std::sqrt(difference / size), bar_of(spec));
  }
}

// A graph reads ids anew in each replay, and adapters that came after it are none of its own.
TEST_F(CudaAdapters, AGraph_ReadsTheIdsOfItsReplay) {
  for (const int64_t tokens : {4, 40}) {
    const MoeSpec spec = make_spec(6, 2, 128, 64, DType::kBF16);
    AdaptedLayer adapted(spec, {.rank = 8}, {.rank = 16});
    DeviceLayer& owned = adapted.owned();
    const Tensor hidden = random_tensor(DType::kBF16, tokens, 128, 3);
    DeviceForward forward(owned, hidden.view(), DType::kF32);
    DeviceTensor ids = owned.queue.upload(id_tensor(tokens, {-1}).view());
    forward.args.adapter_ids = ids.const_view();
    const auto stream = to_cuda(owned.queue.stream());
    const auto graph = cuda::capture(stream, [&] { forward.enqueue(); });
    for (const std::vector<int32_t>& turn :
         {std::vector<int32_t>{-1}, {adapted.ids()[0]}, {-1, adapted.ids()[1]}}) {
      owned.queue.upload(id_tensor(tokens, turn).view(), ids.view());
      ASSERT_EQ(cudaGraphLaunch(graph.get(), stream), cudaSuccess);
      EXPECT_TRUE(same_bits(forward.out(), adapted.run(hidden, id_tensor(tokens, turn)).out));
    }
  }
}

// Two layers run beside each other, and launches begin before those ahead of them have ended: what
// they count and draw is neither another layer's nor the forward's before. Shared experts have the
// scratch of routed ones.
TEST_F(CudaAdapters, GraphsOnTwoStreams_GiveTheBitsOfEach) {
  constexpr int kForwards = 4;
  constexpr int kReplays = 8;
  for (const NumberForm& form : number_forms()) {
    SCOPED_TRACE(form.name);
    MoeSpec spec = with_form(make_spec(32, 4, 512, 768, form.dtype), form);
    spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 768};
    const AdapterChoice choice{.rank = 16, .dtype = DType::kBF16};
    AdaptedLayer one(spec, choice, {.rank = 8}, {.max_tokens = 64});
    AdaptedLayer other(spec, choice, {.rank = 8}, {.max_tokens = 64});
    const auto one_stream = to_cuda(one.owned().queue.stream());
    const auto other_stream = to_cuda(other.owned().queue.stream());
    for (const int64_t tokens : {1, 17, 64}) {
      const Tensor hidden = random_tensor(rows_of(spec), tokens, 512, 3);
      const std::vector<int32_t> turn = {other.ids()[1], other.ids()[0], -1};
      const Tensor ids = id_tensor(tokens, turn);
      DeviceForward for_all(one.owned(), hidden.view(), DType::kF32);
      for_all.args.adapter = one.ids()[0];
      DeviceForward by_token(other.owned(), hidden.view(), DType::kF32);
      const DeviceTensor on_device = other.owned().queue.upload(ids.view());
      by_token.args.adapter_ids = on_device.const_view();
      const auto capture = [&](auto stream, DeviceForward& forward) {
        return cuda::capture(stream, [&] {
          for (int i = 0; i < kForwards; ++i) forward.enqueue();
        });
      };
      const auto one_graph = capture(one_stream, for_all);
      const auto other_graph = capture(other_stream, by_token);
      for (int i = 0; i < kReplays; ++i) {
        ASSERT_EQ(cudaGraphLaunch(one_graph.get(), one_stream), cudaSuccess);
        ASSERT_EQ(cudaGraphLaunch(other_graph.get(), other_stream), cudaSuccess);
      }
      EXPECT_TRUE(same_bits(for_all.out(), one.run(hidden, one.ids()[0]).out)) << "T" << tokens;
      EXPECT_TRUE(same_bits(by_token.out(), other.run(hidden, ids).out)) << "T" << tokens;
    }
  }
}

// Sets that graphs were captured with outlive their adapters, until nobody launches the graphs.
TEST_F(CudaAdapters, AGraph_KeepsAdaptersThatAreRemoved) {
  const int64_t tokens = 40;
  const MoeSpec spec = make_spec(6, 2, 128, 64, DType::kBF16);
  AdaptedLayer adapted(spec, {.rank = 8}, {.rank = 16});
  DeviceLayer& owned = adapted.owned();
  const Tensor hidden = random_tensor(DType::kBF16, tokens, 128, 3);
  DeviceForward forward(owned, hidden.view(), DType::kF32);
  forward.args.adapter = adapted.ids()[0];
  const auto stream = to_cuda(owned.queue.stream());
  const auto graph = cuda::capture(stream, [&] { forward.enqueue(); });
  const LayerOutput expected = adapted.run(hidden, adapted.ids()[0]);
  EXPECT_EQ(GraphReplay::kept_bytes(adapted.layer()), 0U);
  const size_t bytes = adapted.layer().adapters()[0].bytes;
  adapted.layer().remove_adapter(adapted.ids()[0]);
  EXPECT_EQ(GraphReplay::kept_bytes(adapted.layer()), bytes);
  // Memory that was given back would have these values.
  for (int i = 0; i < 3; ++i) adapted.layer().add_adapter(adapted.adapters()[1]);
  ASSERT_EQ(cudaGraphLaunch(graph.get(), stream), cudaSuccess);
  EXPECT_TRUE(same_bits(forward.out(), expected.out));
  EXPECT_EQ(GraphReplay::forget_graphs(adapted.layer()), bytes);
  EXPECT_EQ(GraphReplay::kept_bytes(adapted.layer()), 0U);
}

// Forwards run while adapters come and go: each sees a set as a whole.
TEST_F(CudaAdapters, ComeAndGo_BesideForwards) {
  const MoeSpec spec = make_spec(4, 2, 64, 32, DType::kBF16);
  AdaptedLayer adapted(spec, {.rank = 8}, {.rank = 4});
  const Tensor hidden = random_tensor(DType::kBF16, 16, 64, 3);
  const int32_t id = adapted.ids()[0];
  const LayerOutput expected = adapted.run(hidden, id);
  std::atomic<bool> done{false};
  std::thread changer([&] {
    while (!done.load()) {
      adapted.layer().remove_adapter(adapted.layer().add_adapter(adapted.adapters()[1]));
    }
  });
  for (int i = 0; i < 60; ++i) EXPECT_TRUE(same_bits(adapted.run(hidden, id).out, expected.out));
  done.store(true);
  changer.join();
  EXPECT_EQ(adapted.layer().adapters().size(), 2U);
  EXPECT_GE(adapted.layer().adapters()[0].bytes, 4U * (3 * 64 + 3 * 32) * 8 * sizeof(float));
}

TEST_F(CudaAdapters, PaddingAndLiveTokens_TouchNoOtherToken) {
  for (const int64_t tokens : {6, 40}) {
    const MoeSpec spec = make_spec(6, 2, 128, 64, DType::kBF16);
    AdaptedLayer adapted(spec, {.rank = 8}, {.rank = 16});
    DeviceLayer& owned = adapted.owned();
    const Tensor hidden = random_tensor(DType::kBF16, tokens, 128, 3);
    const Tensor ids = id_tensor(tokens, {adapted.ids()[0], -1, adapted.ids()[1]});
    const LayerOutput whole = adapted.run(hidden, ids);
    Tensor live(DType::kI64, {1});
    live.as<int64_t>()[0] = tokens / 2;
    const DeviceTensor live_count = owned.queue.upload(live.view());
    const DeviceTensor on_device = owned.queue.upload(ids.view());
    DeviceForward forward(owned, hidden.view(), DType::kF32);
    forward.args.adapter_ids = on_device.const_view();
    forward.args.num_tokens = static_cast<const int64_t*>(live_count.const_view().data);
    forward.enqueue();
    const Tensor out = forward.out();
    for (int64_t t = 0; t < tokens; ++t) {
      const std::vector<std::byte> poison(row_bytes(out, t).size(), std::byte{0xFF});
      EXPECT_EQ(row_bytes(out, t), t < tokens / 2 ? row_bytes(whole.out, t) : poison) << t;
    }
  }
}

}  // namespace
}  // namespace conclave::testing
