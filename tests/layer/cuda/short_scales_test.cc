// Compares layers on a GPU, whose codes stand for whole numbers in their order, with float64:
// beside scales that bf16 holds, for which kernels make a weight in one instruction, and beside
// others.
#include "device_layer.h"
#include "layer/cuda/few_tokens.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>

namespace conclave {
namespace {

using testing::CudaLayerTest;
using testing::DeviceLayer;
using testing::make_spec;
using testing::random_tensor;

// Scales of experts as float32 numbers, of as many bits as bf16 has or of three more; of either
// sign, and some of them 0.
class ScalesOfBits final : public WeightSource {
 public:
  ScalesOfBits(std::unique_ptr<WeightSource> inner, bool are_short)
      : inner_(std::move(inner)), are_short_(are_short) {}

  WeightInfo describe(WeightId id) const override {
    WeightInfo info = inner_->describe(id);
    if (is_scale(id)) info.dtype = DType::kF32;
    return info;
  }
  std::string locate(WeightId id, int64_t expert) const override {
    return inner_->locate(id, expert);
  }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    if (!is_scale(id)) return inner_->read(id, expert, block, destination);
    const int64_t width = block.col_end - block.col_begin;
    const auto count = static_cast<int64_t>(destination.size() / sizeof(float));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = block.row_begin + i / width;
      const int64_t group = block.col_begin + i % width;
      const float scale = scale_of(static_cast<uint64_t>((expert * 4096 + row) * 64 + group));
      std::memcpy(destination.data() + i * int64_t{sizeof(float)}, &scale, sizeof(float));
    }
  }

 private:
  static bool is_scale(WeightId id) { return id.mlp() && id.plane() == WeightPlane::kScale; }

  float scale_of(uint64_t place) const {
    const uint64_t hash = (place + 1) * 0x9e3779b97f4a7c15U >> 40;
    if (hash % 61 == 0) return 0.0F;
    const auto mantissa = static_cast<float>(128 + hash % 128);
    const float more = are_short_ ? 0.0F : static_cast<float>(hash / 128 % 8) / 8;
    const float sign = hash % 7 == 0 ? -1.0F : 1.0F;
    return sign * (mantissa + more) * 0x1p-14F;
  }

  std::unique_ptr<WeightSource> inner_;
  bool are_short_;
};

struct Form {
  const char* name;
  DType dtype;
  int64_t columns;
};
constexpr Form kForms[] = {{"int4, 32 columns", DType::kI4, 32},
                           {"int4, 64 columns", DType::kI4, 64},
                           {"int4, 128 columns", DType::kI4, 128}};

MoeSpec spec_of(const Form& form) {
  MoeSpec spec = make_spec(4, 2, 1032, 776, form.dtype);
  spec.quant = {.weights = WeightScale::kBlock,
                .block_rows = 1,
                .block_cols = form.columns,
                .signed_scales = true};
  spec.has_bias = true;
  return spec;
}

std::unique_ptr<WeightSource> source_of(const MoeSpec& spec, bool are_short) {
  return std::make_unique<ScalesOfBits>(make_synthetic_source(spec, 5), are_short);
}

void expect_accurate(DeviceLayer& owned, const WeightSource& source, int64_t tokens) {
  SCOPED_TRACE(::testing::Message() << "T" << tokens);
  const MoeSpec& spec = owned.layer.spec();
  const Tensor hidden = random_tensor(DType::kBF16, tokens, spec.hidden_size, 3);
  const testing::LayerOutput output = testing::run_device_layer(owned, hidden.view(), DType::kBF16);
  const StageCheck check =
      check_against_reference(owned.host, spec, source, output.result(hidden.const_view()));
  EXPECT_LE(check.worst_token_error, accuracy_bar(spec.weight_dtype, DType::kBF16));
}

class CudaShortScales : public CudaLayerTest {};

TEST_F(CudaShortScales, EitherKind_IsWithinTheBarInEveryKernel) {
  for (const Form& form : kForms) {
    for (const bool are_short : {true, false}) {
      SCOPED_TRACE(std::string(form.name) + (are_short ? ", short" : ", of more bits"));
      const MoeSpec spec = spec_of(form);
      for (const char* kernel : {"cuda.tile_codes_sm90", "cuda.stream_codes_sm90"}) {
        SCOPED_TRACE(kernel);
        DeviceLayer owned(spec, source_of(spec, are_short), {.max_tokens = 490, .kernel = kernel});
        for (const int64_t tokens : {1, 200, 490}) expect_accurate(owned, *owned.source, tokens);
      }
      DeviceLayer few(spec, source_of(spec, are_short),
                      {.max_tokens = 8, .tuning = testing::one_launch_table(spec)});
      for (const int64_t tokens : {1, 2, 8}) expect_accurate(few, *few.source, tokens);
    }
  }
}

// A layer that was made of one kind takes the other.
TEST_F(CudaShortScales, Reload_MayBringTheOtherKind) {
  for (const Form& form : kForms) {
    SCOPED_TRACE(form.name);
    const MoeSpec spec = spec_of(form);
    DeviceLayer owned(spec, source_of(spec, true),
                      {.max_tokens = 490, .kernel = "cuda.tile_codes_sm90"});
    for (const bool are_short : {false, true}) {
      for (const ReloadMode mode : {ReloadMode::kStaged, ReloadMode::kInPlace}) {
        const std::unique_ptr<WeightSource> other = source_of(spec, are_short);
        owned.layer.reload(*other, mode);
        expect_accurate(owned, *other, 490);
      }
    }
  }
}

}  // namespace
}  // namespace conclave
