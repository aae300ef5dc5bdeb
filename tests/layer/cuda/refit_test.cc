// Refits of layers on a GPU: every kind of part in every mode gives the bits and the hash of a
// layer that was made from the merged weights, and what fails leaves the old ones.
#include "layer/cuda/refit_cases.h"
#include "support/role_sources.h"

#include "conclave/shared_weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <unistd.h>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::DeviceLayer;
using testing::FailsAtRead;
using testing::kRefitModes;
using testing::make_spec;
using testing::NamedSource;
using testing::NanGate;
using testing::RefitCase;
using testing::same_outputs;
using testing::TwoWeights;

class CudaRefitTest : public testing::CudaLayerTest {};

std::vector<RefitScope> scopes_of(const TwoWeights& two) {
  std::vector<RefitScope> scopes = {{},
                                    {.experts = {4}},
                                    {.experts = {0, 1, 3, 5}},
                                    {.tensors = {weights::kDown}},
                                    {.experts = {2, 5}, .tensors = {weights::kUp}}};
  for (const WeightId id : testing::roles_of(*two.first)) {
    const bool is_matrix = id.plane() == WeightPlane::kWeights;
    if (!id.mlp() || (is_matrix && id.mlp() != WeightMlp::kRouted)) {
      scopes.push_back({.tensors = {id}});
    }
  }
  return scopes;
}

TEST_F(CudaRefitTest, EveryScopeAndMode_GivesTheMergedLayer) {
  for (const RefitCase& each : testing::refit_cases()) {
    const TwoWeights two(each.spec);
    DeviceLayer old_layer(two.spec, two.of_first(), {.max_tokens = 64});
    const auto before = two.run(old_layer);
    const uint64_t old_hash = Refit::content_hash(old_layer.layer);
    for (const RefitScope& scope : scopes_of(two)) {
      DeviceLayer fresh(two.spec, two.merged(scope), {.max_tokens = 64});
      const NamedSource named(two.spec, *fresh.source, scope);
      const auto expected = two.run(fresh);
      for (const RefitMode mode : kRefitModes) {
        SCOPED_TRACE(::testing::Message()
                     << each.name << ", mode " << static_cast<int>(mode) << ", "
                     << (scope.tensors.empty() ? "all" : to_string(scope.tensors[0])) << " of "
                     << scope.experts.size() << " experts");
        DeviceLayer owned(two.spec, two.of_first(), {.max_tokens = 64});
        Refit refit(owned.layer, {.mode = mode, .scope = scope});
        refit.stage(named);
        if (mode != RefitMode::kInPlace) {
          EXPECT_TRUE(same_outputs(two.run(owned), before));
        }
        refit.commit();
        EXPECT_TRUE(same_outputs(two.run(owned), expected));
        EXPECT_EQ(Refit::content_hash(owned.layer), Refit::content_hash(fresh.layer));
        EXPECT_NE(Refit::content_hash(owned.layer), old_hash);
        EXPECT_EQ(owned.layer.status().refit_epoch, 1U);
      }
    }
  }
}

TEST_F(CudaRefitTest, RowsOfTheGateWithNan_AreThoseOfTheGateThatTheLayerHas) {
  const TwoWeights two(make_spec(6, 2, 128, 64, DType::kBF16));
  for (const RefitMode mode : kRefitModes) {
    SCOPED_TRACE(static_cast<int>(mode));
    DeviceLayer owned(two.spec, two.of_first(), {.max_tokens = 64});
    const auto count = [&] { return owned.layer.status().gate_rows_with_nan; };
    const auto refit_with = [&](const WeightSource& source, const RefitScope& scope) {
      const int64_t before = count();
      Refit refit(owned.layer, {.mode = mode, .scope = scope});
      refit.stage(source);
      EXPECT_EQ(count(), before);
      refit.commit();
    };
    refit_with(NanGate(*two.second, {0, 2, 5}), {});
    EXPECT_EQ(count(), 3);
    refit_with(*two.second, {.experts = {1}});  // leaves the gate alone
    EXPECT_EQ(count(), 3);
    refit_with(NanGate(*two.second, {4}), {.tensors = {weights::kRouter}});
    EXPECT_EQ(count(), 1);
    {
      Refit withdrawn(owned.layer, {.mode = RefitMode::kStaged});
      withdrawn.stage(*two.first);
    }
    EXPECT_EQ(count(), 1);
    refit_with(*two.second, {.tensors = {weights::kRouter}});
    EXPECT_EQ(count(), 0);
  }
}

// Parts in any order, one of them twice, and back again in a second transaction.
TEST_F(CudaRefitTest, StagedInParts_IsAsStagedAtOnce) {
  for (const RefitCase& each : testing::refit_cases()) {
    const TwoWeights two(each.spec);
    DeviceLayer fresh(two.spec, two.of_second(), {.max_tokens = 64});
    const auto expected = two.run(fresh);
    for (const RefitMode mode : kRefitModes) {
      SCOPED_TRACE(::testing::Message() << each.name << ", mode " << static_cast<int>(mode));
      DeviceLayer owned(two.spec, two.of_first(), {.max_tokens = 64});
      const uint64_t old_hash = Refit::content_hash(owned.layer);
      Refit refit(owned.layer, {.mode = mode, .keeps_memory = true});
      refit.stage(*two.first, {.experts = {1, 4}});
      refit.stage(*two.second, {.experts = {3, 0, 5}});
      EXPECT_EQ(code_of([&] { refit.commit(); }), ErrorCode::kState);
      refit.stage(*two.second, {.experts = {1, 2, 4}});
      RefitScope rest;
      for (const WeightId id : testing::roles_of(*two.first)) {
        if (id.mlp() != WeightMlp::kRouted) rest.tensors.push_back(id);
      }
      refit.stage(*two.second, rest);
      EXPECT_TRUE(refit.is_staged());
      refit.commit();
      EXPECT_TRUE(same_outputs(two.run(owned), expected));
      EXPECT_EQ(Refit::content_hash(owned.layer), Refit::content_hash(fresh.layer));
      Refit back(owned.layer, {.mode = mode, .epoch = 40, .keeps_memory = true});
      back.stage(*two.first);
      back.commit();
      EXPECT_EQ(Refit::content_hash(owned.layer), old_hash);
      EXPECT_EQ(owned.layer.status().refit_epoch, 40U);
    }
  }
}

TEST_F(CudaRefitTest, AnyReadFails_KeepsTheOldLayerOrNone) {
  for (const RefitCase& each : testing::refit_cases()) {
    const TwoWeights two(each.spec);
    DeviceLayer owned(two.spec, two.of_first(), {.max_tokens = 64});
    const auto before = two.run(owned);
    const uint64_t hash = Refit::content_hash(owned.layer);
    for (const RefitMode mode : kRefitModes) {
      SCOPED_TRACE(::testing::Message() << each.name << ", mode " << static_cast<int>(mode));
      for (int64_t read = 0;; read += 5) {
        const FailsAtRead failing(*two.second, read);
        Refit refit(owned.layer, {.mode = mode});
        const bool has_failed = code_of([&] { refit.stage(failing); }) == ErrorCode::kFileRead;
        ASSERT_EQ(has_failed, failing.has_failed());
        EXPECT_EQ(refit.is_staged(), !has_failed);
        if (!has_failed) break;
        EXPECT_EQ(code_of([&] { refit.commit(); }), ErrorCode::kFileRead);
        refit.rollback();
        if (code_of([&] { two.run(owned); }) == ErrorCode::kState) {
          ASSERT_EQ(mode, RefitMode::kInPlace);
          EXPECT_EQ(code_of([&] { Refit(owned.layer, {.scope = {.experts = {1}}}); }),
                    ErrorCode::kState);
          EXPECT_EQ(code_of([&] { Refit::content_hash(owned.layer); }), ErrorCode::kState);
          Refit again(owned.layer);
          again.stage(*two.first);
          again.commit();
        }
        EXPECT_TRUE(same_outputs(two.run(owned), before));
      }
      // The last one was staged as a whole and rolled back.
      if (mode == RefitMode::kInPlace) {
        EXPECT_EQ(code_of([&] { Refit::content_hash(owned.layer); }), ErrorCode::kState);
      } else {
        EXPECT_EQ(Refit::content_hash(owned.layer), hash);
      }
      Refit heal(owned.layer);
      heal.stage(*two.first);
      heal.commit();
      EXPECT_EQ(Refit::content_hash(owned.layer), hash);
    }
  }
}

TEST_F(CudaRefitTest, RolledBack_HasTheOldWeights) {
  const TwoWeights two(testing::refit_cases()[0].spec);
  DeviceLayer owned(two.spec, two.of_first(), {.max_tokens = 64});
  const auto before = two.run(owned);
  Refit refit(owned.layer);
  refit.stage(*two.second);
  EXPECT_EQ(code_of([&] { Refit(owned.layer); }), ErrorCode::kState);
  EXPECT_EQ(code_of([&] { owned.layer.reload(*two.second, ReloadMode::kStaged); }),
            ErrorCode::kState);
  refit.rollback();
  EXPECT_EQ(code_of([&] { refit.stage(*two.second); }), ErrorCode::kState);
  EXPECT_TRUE(same_outputs(two.run(owned), before));
  EXPECT_EQ(owned.layer.status().refit_epoch, 0U);
  owned.layer.reload(*two.first, ReloadMode::kInPlace);
  EXPECT_TRUE(same_outputs(two.run(owned), before));
}

// Fails at one call.
class FailingAllocator final : public DeviceAllocator {
 public:
  explicit FailingAllocator(DeviceAllocator& inner) : inner_(inner) {}
  void* allocate(size_t bytes, size_t alignment, Stream stream) override {
    if (left-- == 0) return nullptr;
    ++outstanding;
    return inner_.allocate(bytes, alignment, stream);
  }
  void deallocate(void* data, size_t bytes, Stream stream) noexcept override {
    --outstanding;
    inner_.deallocate(data, bytes, stream);
  }
  int64_t left = std::numeric_limits<int64_t>::max();
  int64_t outstanding = 0;

 private:
  DeviceAllocator& inner_;
};

TEST_F(CudaRefitTest, NoMemory_IsATypedErrorAndLeaksNothing) {
  const Context plain({.device = "cuda:0", .num_threads = 1});
  FailingAllocator allocator(*plain.device_allocator());
  const TwoWeights two(testing::refit_cases()[0].spec);
  DeviceLayer owned({.device = "cuda:0", .num_threads = 1, .device_allocator = &allocator},
                    two.spec, two.of_first(), {.max_tokens = 64}, {});
  const auto before = two.run(owned);
  const int64_t outstanding = allocator.outstanding;
  int64_t points = 0;
  for (bool failed = true; failed; ++points) {
    allocator.left = points;
    const ErrorCode code = code_of([&] { Refit(owned.layer).stage(*two.second); });
    failed = allocator.left < 0;
    EXPECT_EQ(code, failed ? ErrorCode::kOutOfMemory : ErrorCode{0}) << "allocation " << points;
    EXPECT_EQ(allocator.outstanding, outstanding) << "allocation " << points;
  }
  allocator.left = std::numeric_limits<int64_t>::max();
  EXPECT_GT(points, 8);
  EXPECT_TRUE(same_outputs(two.run(owned), before));
}

// A refit after one that kept its memory takes none for experts.
TEST_F(CudaRefitTest, KeptMemory_ServesTheNextRefit) {
  const Context plain({.device = "cuda:0", .num_threads = 1});
  testing::CountingAllocator counter(*plain.device_allocator());
  MoeSpec spec = make_spec(6, 2, 256, 128, DType::kBF16);
  const TwoWeights two(spec);
  DeviceLayer owned({.device = "cuda:0", .num_threads = 1, .device_allocator = &counter}, two.spec,
                    two.of_first(), {.max_tokens = 64}, {});
  std::vector<int64_t> bytes;
  for (int i = 0; i < 3; ++i) {
    const int64_t before = counter.all_bytes;
    Refit refit(owned.layer, {.keeps_memory = true});
    refit.stage(i % 2 == 0 ? *two.second : *two.first);
    refit.commit();
    bytes.push_back(counter.all_bytes - before);
  }
  constexpr int64_t kExperts = int64_t{6} * 3 * 256 * 128 * 2;
  EXPECT_GE(bytes[0], kExperts);
  EXPECT_LT(bytes[1], kExperts / 8);
  EXPECT_EQ(bytes[2], bytes[1]);
  DeviceLayer fresh(two.spec, two.of_second(), {.max_tokens = 64});
  EXPECT_TRUE(same_outputs(two.run(owned), two.run(fresh)));
}

// A source of another type for a matrix of the layer itself.
class OtherType final : public WeightSource {
 public:
  explicit OtherType(const WeightSource& inner) : inner_(inner) {}
  WeightInfo describe(WeightId id) const override {
    WeightInfo info = inner_.describe(id);
    if (id == weights::kRouter) {
      info.dtype = info.dtype == DType::kF32 ? DType::kBF16 : DType::kF32;
    }
    return info;
  }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    if (id == weights::kRouter) {
      std::ranges::fill(destination, std::byte{0});
    } else {
      inner_.read(id, expert, block, destination);
    }
  }

 private:
  const WeightSource& inner_;
};

TEST_F(CudaRefitTest, MatrixOfAnotherType_IsRefusedBeforeAnythingChanges) {
  const TwoWeights two(make_spec(6, 2, 128, 64, DType::kBF16));
  DeviceLayer owned(two.spec, two.of_first(), {.max_tokens = 64});
  const auto before = two.run(owned);
  const OtherType other(*two.second);
  for (const RefitMode mode : kRefitModes) {
    Refit refit(owned.layer, {.mode = mode});
    EXPECT_EQ(code_of([&] { refit.stage(other); }), ErrorCode::kTensorDType);
  }
  EXPECT_TRUE(same_outputs(two.run(owned), before));
  EXPECT_EQ(code_of([&] { owned.layer.reload(other, ReloadMode::kInPlace); }),
            ErrorCode::kTensorDType);
}

// Another process's weights, of two experts alone.
TEST_F(CudaRefitTest, SharedWeights_AreASource) {
  const TwoWeights two(make_spec(6, 2, 128, 64, DType::kBF16));
  const RefitScope scope{.experts = {5, 2}};
  const std::filesystem::path path =
      std::filesystem::path("/dev/shm") / ("cuda_refit_test." + std::to_string(getpid()));
  {
    std::vector<SharedTensor> tensors;
    for (const WeightId id : {weights::kGate, weights::kUp, weights::kDown}) {
      tensors.push_back({.id = id, .info = two.second->describe(id), .experts = scope.experts});
    }
    SharedWeightsWriter writer(path, tensors);
    writer.begin();
    for (const SharedTensor& tensor : tensors) {
      for (const int32_t expert : tensor.experts) {
        two.second->read(tensor.id, expert, {0, tensor.info.rows, 0, tensor.info.cols},
                         writer.memory(tensor.id, expert));
      }
    }
    writer.publish(7);
  }
  const SharedWeights shared(path);
  std::filesystem::remove(path);
  DeviceLayer fresh(two.spec, two.merged(scope), {.max_tokens = 64});
  DeviceLayer owned(two.spec, two.of_first(), {.max_tokens = 64});
  Refit refit(owned.layer, {.scope = scope, .epoch = shared.version()});
  refit.stage(shared);
  refit.commit();
  EXPECT_TRUE(same_outputs(two.run(owned), two.run(fresh)));
  EXPECT_EQ(owned.layer.status().refit_epoch, 7U);
}

// Weights that a framework keeps on the device: as a source, and as what a layer reads in place.
TEST_F(CudaRefitTest, DeviceTensors_AreASourceAndStayTheCallers) {
  MoeSpec spec = make_spec(6, 2, 128, 64, DType::kBF16);
  spec.has_gate = false;
  const TwoWeights two(spec);
  DeviceLayer owned(spec, two.of_first(), {.max_tokens = 64});
  DeviceLayer fresh(spec, two.of_second(), {.max_tokens = 64});
  Tensor gate_up(DType::kBF16, {6, 128, 128});
  Tensor down(DType::kBF16, {6, 128, 64});
  constexpr size_t kBytes = size_t{64} * 128 * 2;
  for (int64_t expert = 0; expert < 6; ++expert) {
    std::byte* const at = gate_up.as<std::byte>() + static_cast<size_t>(expert) * 2 * kBytes;
    two.second->read(weights::kGate, expert, {0, 64, 0, 128}, {at, kBytes});
    two.second->read(weights::kUp, expert, {0, 64, 0, 128}, {at + kBytes, kBytes});
    two.second->read(weights::kDown, expert, {0, 128, 0, 64},
                     {down.as<std::byte>() + static_cast<size_t>(expert) * kBytes, kBytes});
  }
  const DeviceTensor device_gate_up = owned.queue.upload(gate_up.const_view());
  const DeviceTensor device_down = owned.queue.upload(down.const_view());
  const auto source = make_pointer_source({.gate_up = device_gate_up.const_view(),
                                           .down = device_down.const_view(),
                                           .memory = MemoryKind::kDevice});
  for (const RefitMode mode : kRefitModes) {
    Refit refit(owned.layer, {.mode = mode});
    refit.stage(*source);
    refit.commit();
    EXPECT_EQ(Refit::content_hash(owned.layer), Refit::content_hash(fresh.layer));
  }
  MoeLayer lent = MoeLayer::create(owned.context, spec, *source, {.max_tokens = 64});
  EXPECT_EQ(code_of([&] { Refit{lent}; }), ErrorCode::kUnsupported);
  EXPECT_EQ(Refit::content_hash(lent), Refit::content_hash(fresh.layer));
  Refit refit(lent, {.mode = RefitMode::kInPlace});
  EXPECT_EQ(code_of([&] { refit.stage(*two.first); }), ErrorCode::kState);
  refit.stage(*source);
  refit.commit();
  EXPECT_EQ(lent.status().refit_epoch, 1U);
}

}  // namespace
}  // namespace conclave
