// Layers whose scales and offsets a GPU holds as steps have the bits of those with float32 numbers.
#include "device_layer.h"
#include "layer/cuda/few_tokens.h"
#include "step_specs.h"

#include "conclave/placement.h"
#include "conclave/tuning.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::bytes_with_offsets;
using testing::CudaLayerTest;
using testing::DeviceLayer;
using testing::in_floats;
using testing::in_steps;
using testing::make_spec;
using testing::random_tensor;
using testing::step_shapes;

class CudaStepFactors : public CudaLayerTest {
 protected:
  static std::unique_ptr<WeightSource> source_of(const MoeSpec& spec) {
    return make_synthetic_source(spec, 7);
  }
  // The same weights, in either form.
  static std::pair<std::unique_ptr<DeviceLayer>, std::unique_ptr<DeviceLayer>> both(
      const MoeSpec& spec, const LayerOptions& options, const ParallelSpec& part = {}) {
    return {std::make_unique<DeviceLayer>(spec, source_of(spec), options, part),
            std::make_unique<DeviceLayer>(in_floats(spec), source_of(spec), options, part)};
  }
  static Tensor run(DeviceLayer& owned, const Tensor& hidden) {
    testing::DeviceForward forward(owned, hidden.view(), DType::kF32);
    const testing::GivenRouting routing = testing::random_routing(
        hidden.shape()[0], owned.layer.spec().num_experts, owned.layer.spec().top_k, 3);
    forward.route_by(routing.ids, routing.weights);
    forward.enqueue();
    return forward.out();
  }
  static void expect_same_bits(DeviceLayer& narrow, DeviceLayer& wide, int64_t tokens) {
    const Tensor hidden = random_tensor(DType::kBF16, tokens, narrow.layer.spec().hidden_size, 5);
    EXPECT_TRUE(testing::same_bits(run(narrow, hidden), run(wide, hidden))) << "T" << tokens;
  }
};

TEST_F(CudaStepFactors, EveryTile_HasTheBitsOfFloat32) {
  for (const MoeSpec& shape : step_shapes()) {
    const MoeSpec spec = in_steps(shape);
    for (const int64_t tokens : {1, 37, 290}) {
      const Context context({.device = "cuda:0", .num_threads = 1});
      const LayerOptions options{.max_tokens = tokens};
      int tiles = 0;
      for (const TuningEntry& entry : tuning_candidates(context, spec, options, {}, tokens)) {
        const bool is_coded =
            entry.kernel == "cuda.stream_codes_sm90" || entry.kernel == "cuda.tile_codes_sm90";
        if (!is_coded) continue;
        SCOPED_TRACE(entry.kernel + ", " + entry.tile);
        auto table = std::make_shared<TuningTable>();
        table->set(entry);
        DeviceLayer narrow(spec, source_of(spec), {.max_tokens = tokens, .tuning = table});
        ASSERT_EQ(narrow.layer.plan().ladder.back().tile, entry.tile);
        // Float32 numbers leave room for other rings, which have the same bits.
        DeviceLayer wide(in_floats(spec), source_of(spec),
                         {.max_tokens = tokens, .kernel = entry.kernel});
        expect_same_bits(narrow, wide, tokens);
        ++tiles;
      }
      EXPECT_GE(tiles, 6);
    }
  }
}

TEST_F(CudaStepFactors, OneLaunch_HasTheBitsOfFloat32) {
  for (const MoeSpec& shape : step_shapes()) {
    const MoeSpec spec = in_steps(shape);
    DeviceLayer narrow(spec, source_of(spec),
                       {.max_tokens = 8, .tuning = testing::one_launch_table(spec)});
    DeviceLayer wide(in_floats(spec), source_of(spec),
                     {.max_tokens = 8, .tuning = testing::one_launch_table(in_floats(spec))});
    for (const int64_t tokens : {1, 2, 5, 8}) expect_same_bits(narrow, wide, tokens);
  }
}

// int8 rows beside them, float32 rows of a projection, and factors of columns.
TEST_F(CudaStepFactors, OtherRows_HaveTheBitsOfFloat32) {
  MoeSpec quantised = in_steps(make_spec(4, 2, 520, 296, DType::kU4));
  quantised.quant.activations = ActivationScale::kToken;
  MoeSpec projected = in_steps(make_spec(4, 2, 264, 328, DType::kU4));
  projected.latent = {.size = 320, .has_norm = true};
  MoeSpec scaled = in_steps(make_spec(4, 2, 520, 296, DType::kU4));
  scaled.quant.has_column_factors = true;
  for (const MoeSpec& spec :
       {quantised, projected, scaled, bytes_with_offsets(projected), bytes_with_offsets(scaled)}) {
    const auto [narrow, wide] = both(spec, {.max_tokens = 64});
    for (const int64_t tokens : {1, 40}) expect_same_bits(*narrow, *wide, tokens);
  }
}

// Slices of 96 columns begin within the columns of a unit, and hold float32 numbers then.
TEST_F(CudaStepFactors, Slices_HaveTheBitsOfFloat32) {
  const MoeSpec lanes = in_steps(make_spec(4, 2, 520, 288, DType::kU4));
  for (const MoeSpec& spec : {lanes, bytes_with_offsets(lanes)}) {
    for (int32_t rank = 0; rank < 3; ++rank) {
      const ParallelSpec part{.tp_size = 3, .tp_rank = rank, .reduce = Reduce::kPartial};
      const auto [narrow, wide] = both(spec, {.max_tokens = 64}, part);
      expect_same_bits(*narrow, *wide, 20);
    }
  }
}

TEST_F(CudaStepFactors, Reload_BringsItsSteps) {
  const MoeSpec spec = in_steps(make_spec(4, 2, 520, 296, DType::kU4));
  DeviceLayer other(spec, make_synthetic_source(spec, 99), {.max_tokens = 64});
  DeviceLayer reloaded(spec, source_of(spec), {.max_tokens = 64});
  reloaded.layer.reload(*other.source, ReloadMode::kInPlace);
  expect_same_bits(reloaded, other, 20);
}

TEST_F(CudaStepFactors, Memory_IsThatOfCodesAndBytes) {
  // 256 codes with eight groups of two numbers, with two times eight groups of one, or with two
  // times four groups of two.
  const MoeSpec lanes = in_steps(make_spec(8, 2, 2048, 1024, DType::kU4));
  for (auto [spec, bytes] :
       {std::pair{lanes, 128 + 8 * 2 + 8},
        std::pair{in_steps(make_spec(8, 2, 2048, 1024, DType::kI8)), 256 + 2 * (8 + 4)},
        std::pair{bytes_with_offsets(lanes), 256 + 2 * (4 * 2 + 8)}}) {
    spec.has_gate = false;
    const auto source = source_of(spec);
    const Context device({.device = "cuda:0", .num_threads = 1});
    testing::CountingAllocator counter(*device.device_allocator());
    const Context context({.device = "cuda:0", .num_threads = 1, .device_allocator = &counter});
    const MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_tokens = 64});
    const int64_t stored = int64_t{3} * 8 * 2048 * 1024 / 256 * bytes;
    EXPECT_LE(counter.all_bytes, stored + stored / 50);
  }
}

// One number of one matrix is no step of its neighbours'.
class OneOtherNumber final : public WeightSource {
 public:
  OneOtherNumber(std::unique_ptr<WeightSource> inner, WeightId id)
      : inner_(std::move(inner)), id_(id) {}

  WeightInfo describe(WeightId id) const override { return inner_->describe(id); }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    inner_->read(id, expert, block, destination);
    if (id != id_ || expert != 2 || block.row_begin > 3 || block.row_end <= 3) return;
    const float other = 0.1F;
    const auto at = static_cast<size_t>((3 - block.row_begin) * (block.col_end - block.col_begin));
    std::memcpy(destination.data() + at * sizeof(float), &other, sizeof(float));
  }
  std::string locate(WeightId id, int64_t expert) const override {
    return (id == id_ ? "that of expert " : "another of ") + std::to_string(expert);
  }

 private:
  std::unique_ptr<WeightSource> inner_;
  WeightId id_;
};

TEST_F(CudaStepFactors, NumberThatIsNoStep_IsRefusedByName) {
  const MoeSpec lanes = in_steps(make_spec(3, 2, 512, 512, DType::kU4));
  const auto expect_refused = [](const MoeSpec& spec, WeightId id) {
    ASSERT_EQ(source_of(spec)->describe(id).dtype, DType::kF32);
    const auto make = [&](const MoeSpec& wanted) {
      const DeviceLayer made(wanted, std::make_unique<OneOtherNumber>(source_of(spec), id),
                             {.max_tokens = 8});
    };
    EXPECT_NO_THROW(make(in_floats(spec)));
    try {
      make(spec);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kTensorValue);
      EXPECT_EQ(error.detail().tensor, "that of expert 2");
      EXPECT_EQ(error.detail().found, "0.1");
    }
  };
  for (const MoeSpec& spec : {lanes, bytes_with_offsets(lanes)}) {
    for (const WeightId id :
         {weights::kGate.with(WeightPlane::kScale), weights::kUp.with(WeightPlane::kZero),
          weights::kDown.with(WeightPlane::kScale), weights::kDown.with(WeightPlane::kZero)}) {
      expect_refused(spec, id);
    }
  }
}

}  // namespace
}  // namespace conclave
