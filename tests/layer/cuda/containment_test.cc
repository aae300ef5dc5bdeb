// Values that are not finite stay in the tokens that use them; meaningless scales are refused in
// any memory; every code of e4m3 is read as it was written.

#include "core/float8.h"
#include "device_layer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::DeviceForward;
using testing::DeviceLayer;
using testing::GivenRouting;
using testing::make_spec;
using testing::NumberForm;
using testing::random_tensor;

constexpr int64_t kExperts = 6;
constexpr int64_t kTopK = 2;
constexpr int64_t kHidden = 264;
constexpr int64_t kInner = 136;
constexpr int64_t kTokenCounts[] = {4, 40, 300};

// Another source, with some elements replaced.
class Patched final : public WeightSource {
 public:
  explicit Patched(const WeightSource& source) : source_(source) {}

  // Sets the bits of an element in the role's type.
  void set(WeightId role, int64_t expert, int64_t row, int64_t col, uint32_t bits) {
    patches_.push_back({role, expert, row, col, bits});
  }
  WeightInfo describe(WeightId role) const override { return source_.describe(role); }
  void read(WeightId role, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    source_.read(role, expert, block, destination);
    for (const Patch& patch : patches_) {
      const bool inside = patch.role == role && patch.expert == expert &&
                          patch.row >= block.row_begin && patch.row < block.row_end &&
                          patch.col >= block.col_begin && patch.col < block.col_end;
      if (!inside) continue;
      const auto bytes = static_cast<size_t>(byte_size(describe(role).dtype));
      const int64_t at = (patch.row - block.row_begin) * (block.col_end - block.col_begin) +
                         patch.col - block.col_begin;
      std::memcpy(destination.data() + static_cast<size_t>(at) * bytes, &patch.bits, bytes);
    }
  }

 private:
  struct Patch {
    WeightId role;
    int64_t expert, row, col;
    uint32_t bits;
  };
  const WeightSource& source_;
  std::vector<Patch> patches_;
};

uint32_t nan_bits(DType dtype) {
  switch (dtype) {
    case DType::kF8E4M3:
      return 0x7F;
    case DType::kF16:
      return 0x7E00;
    case DType::kBF16:
      return 0x7FC0;
    default:
      return 0x7FC00000;
  }
}
uint32_t infinity_bits(DType dtype) {
  return dtype == DType::kF16 ? 0x7C00 : dtype == DType::kBF16 ? 0x7F80 : 0x7F800000;
}

void set_bits(Tensor& tensor, int64_t row, int64_t col, uint32_t bits) {
  const auto bytes = static_cast<size_t>(byte_size(tensor.dtype()));
  const int64_t at = row * tensor.shape()[1] + col;
  std::memcpy(tensor.as<std::byte>() + static_cast<size_t>(at) * bytes, &bits, bytes);
}

bool is_finite_row(const Tensor& out, int64_t row) {
  const int64_t columns = out.shape()[1];
  for (int64_t col = 0; col < columns; ++col) {
    if (!std::isfinite(out.as<float>()[row * columns + col])) return false;
  }
  return true;
}

bool uses(const GivenRouting& routing, int64_t token, int32_t expert) {
  for (int64_t slot = 0; slot < kTopK; ++slot) {
    if (routing.ids.as<int32_t>()[token * kTopK + slot] == expert) return true;
  }
  return false;
}

Tensor run(DeviceLayer& owned, const Tensor& hidden, const GivenRouting& routing) {
  DeviceForward forward(owned, hidden.view(), DType::kF32);
  forward.route_by(routing.ids, routing.weights);
  forward.enqueue();
  return forward.out();
}

class CudaContainment : public testing::CudaLayerTest {
 protected:
  static MoeSpec spec(const NumberForm& form) {
    return testing::with_form(make_spec(kExperts, kTopK, kHidden, kInner, form.dtype), form);
  }
  static LayerOptions options() { return {.max_tokens = 300}; }

  // Exactly the tokens that `is_hit` names must not be finite; the others must have the bits of
  // `clean`.
  template <class IsHit>
  static void expect_only(const Tensor& clean, const Tensor& out, const IsHit& is_hit) {
    for (int64_t token = 0; token < out.shape()[0]; ++token) {
      const bool hit = is_hit(token);
      ASSERT_EQ(is_finite_row(out, token), !hit) << "token " << token;
      if (hit) continue;
      ASSERT_TRUE(testing::row_bytes(out, token) == testing::row_bytes(clean, token)) << token;
    }
  }
};

TEST_F(CudaContainment, NanOrInfInOneRow_MakesThatTokenNotFinite) {
  for (const NumberForm& form : testing::number_forms()) {
    DeviceLayer owned(spec(form), options());
    const DType dtype = testing::row_dtype(form);
    for (const int64_t tokens : kTokenCounts) {
      SCOPED_TRACE(::testing::Message() << form.name << " T" << tokens);
      const GivenRouting routing = testing::random_routing(tokens, kExperts, kTopK, 9);
      Tensor hidden = random_tensor(dtype, tokens, kHidden, 5);
      const Tensor clean = run(owned, hidden, routing);
      for (const uint32_t bits : {nan_bits(dtype), infinity_bits(dtype)}) {
        hidden = random_tensor(dtype, tokens, kHidden, 5);
        set_bits(hidden, tokens - 2, kHidden - 1, bits);
        expect_only(clean, run(owned, hidden, routing),
                    [&](int64_t token) { return token == tokens - 2; });
      }
    }
  }
}

TEST_F(CudaContainment, NanOrInfAsOneWeightOfASlot_MakesThatTokenNotFinite) {
  for (const NumberForm& form : testing::number_forms()) {
    DeviceLayer owned(spec(form), options());
    for (const int64_t tokens : kTokenCounts) {
      SCOPED_TRACE(::testing::Message() << form.name << " T" << tokens);
      GivenRouting routing = testing::random_routing(tokens, kExperts, kTopK, 9);
      const Tensor hidden = random_tensor(testing::row_dtype(form), tokens, kHidden, 5);
      const Tensor clean = run(owned, hidden, routing);
      for (const float value :
           {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        routing.weights.as<float>()[1 * kTopK + 1] = value;
        expect_only(clean, run(owned, hidden, routing), [](int64_t token) { return token == 1; });
      }
      // A weight without an expert does not count.
      routing.ids.as<int32_t>()[1 * kTopK + 1] = -1;
      const Tensor with_infinity = run(owned, hidden, routing);
      routing.weights.as<float>()[1 * kTopK + 1] = 0;
      EXPECT_TRUE(testing::same_bits(run(owned, hidden, routing), with_infinity));
      expect_only(with_infinity, with_infinity, [](int64_t) { return false; });
    }
  }
}

TEST_F(CudaContainment, NanInOneExpert_MakesItsTokensNotFinite) {
  for (const NumberForm& form : testing::number_forms()) {
    DeviceLayer owned(spec(form), options());
    for (const WeightId role : {weights::kGate, weights::kUp, weights::kDown}) {
      Patched source(*owned.source);
      source.set(role, 4, 77, 3, nan_bits(form.dtype));
      const MoeLayer spoiled = MoeLayer::create(owned.context, spec(form), source, options());
      for (const int64_t tokens : kTokenCounts) {
        SCOPED_TRACE(::testing::Message() << form.name << " " << to_string(role) << " T" << tokens);
        const GivenRouting routing = testing::random_routing(tokens, kExperts, kTopK, 9);
        const Tensor hidden = random_tensor(testing::row_dtype(form), tokens, kHidden, 5);
        const Tensor clean = run(owned, hidden, routing);
        DeviceForward forward(owned, hidden.view(), DType::kF32);
        forward.route_by(routing.ids, routing.weights);
        spoiled.forward(forward.args);
        expect_only(clean, forward.out(), [&](int64_t token) { return uses(routing, token, 4); });
      }
    }
  }
}

// Scales of e4m3 matrices, in host memory or in device memory, as frameworks hold them.
struct Scales {
  std::vector<float> gate_up, down;
};

class DeviceScales {
 public:
  explicit DeviceScales(const DeviceQueue& queue)
      : queue_(queue),
        gate_up_(queue.upload(codes(2 * kInner, kHidden).view())),
        down_(queue.upload(codes(kHidden, kInner).view())) {}

  static MoeSpec spec() {
    MoeSpec spec = make_spec(kExperts, kTopK, kHidden, kInner, DType::kF8E4M3);
    spec.has_gate = false;
    spec.quant = {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken};
    return spec;
  }
  // Makes a layer with weights in device memory, one of whose scales has this value.
  MoeLayer layer(const Context& context, bool in_down, float value) {
    Tensor gate_up(DType::kF32, {kExperts, 2 * kInner, 1});
    Tensor down(DType::kF32, {kExperts, kHidden, 1});
    std::fill_n(gate_up.as<float>(), kExperts * 2 * kInner, 0x1p-9F);
    std::fill_n(down.as<float>(), kExperts * kHidden, 0x1p-9F);
    (in_down ? down : gate_up).as<float>()[4 * (in_down ? kHidden : 2 * kInner) + 5] = value;
    gate_up_scale_ = queue_.upload(gate_up.view());
    down_scale_ = queue_.upload(down.view());
    const auto source = make_pointer_source({.gate_up = gate_up_.const_view(),
                                             .down = down_.const_view(),
                                             .gate_up_scale = gate_up_scale_.const_view(),
                                             .down_scale = down_scale_.const_view(),
                                             .memory = MemoryKind::kDevice});
    return MoeLayer::create(context, spec(), *source, {.max_tokens = 64});
  }

 private:
  static Tensor codes(int64_t rows, int64_t cols) {
    Tensor tensor(DType::kF8E4M3, {kExperts, rows, cols});
    for (int64_t i = 0; i < kExperts * rows * cols; ++i) {
      const auto code = static_cast<uint8_t>((i * 2654435761U) >> 13);
      tensor.as<uint8_t>()[i] = (code & 0x7F) == 0x7F ? 0x30 : code;
    }
    return tensor;
  }
  const DeviceQueue& queue_;
  DeviceTensor gate_up_, down_, gate_up_scale_, down_scale_;
};

TEST_F(CudaContainment, ScalesInDeviceMemoryThatMeanNothing_AreRefused) {
  const Context context({.device = "cuda:0", .num_threads = 1});
  const DeviceQueue queue(context);
  DeviceScales weights(queue);
  for (const bool in_down : {false, true}) {
    for (const float value :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
          -std::numeric_limits<float>::infinity(), -0x1p-9F}) {
      try {
        const MoeLayer layer = weights.layer(context, in_down, value);
        ADD_FAILURE() << "a layer was made with a scale of " << value;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kTensorValue) << error.what();
        EXPECT_NE(std::string(error.what()).find("expert 4"), std::string::npos) << error.what();
      }
    }
  }
}

// A scale of zero is legal: rows of the matrix are then zero, and nothing becomes NaN.
TEST_F(CudaContainment, ScaleOfZeroInDeviceMemory_GivesZeros) {
  const Context context({.device = "cuda:0", .num_threads = 1});
  const DeviceQueue queue(context);
  DeviceScales weights(queue);
  const MoeLayer layer = weights.layer(context, true, 0);
  Workspace workspace(context, layer.workspace_bytes());
  for (const int64_t tokens : {3, 40}) {
    GivenRouting routing = testing::random_routing(tokens, kExperts, kTopK, 9);
    std::fill_n(routing.ids.as<int32_t>(), tokens * kTopK, 4);
    const DeviceTensor hidden =
        queue.upload(random_tensor(DType::kBF16, tokens, kHidden, 5).view());
    const DeviceTensor ids = queue.upload(routing.ids.view());
    const DeviceTensor slot_weights = queue.upload(routing.weights.view());
    DeviceTensor device_out = queue.allocate(DType::kF32, {tokens, kHidden});
    layer.forward({.hidden = hidden.const_view(),
                   .topk_ids = ids.const_view(),
                   .topk_weights = slot_weights.const_view(),
                   .out = device_out.view(),
                   .workspace = &workspace,
                   .stream = queue.stream()});
    Tensor out(DType::kF32, {tokens, kHidden});
    queue.download(device_out.const_view(), out.view());
    for (int64_t token = 0; token < tokens; ++token) {
      EXPECT_TRUE(is_finite_row(out, token)) << token;
      EXPECT_EQ(out.as<float>()[token * kHidden + 5], 0.0F) << token;
      EXPECT_NE(out.as<float>()[token * kHidden + 6], 0.0F) << token;
    }
  }
}

// Hidden rows are unit vectors, and up products without a gate pass them on (up is a unit matrix,
// relu(1)^2 = 1). So outputs are columns of the down matrix: each code times its scale.
class CodeReader final : public WeightSource {
 public:
  static constexpr int64_t kSize = 256;

  explicit CodeReader(WeightScale form) : form_(form) {}

  // Element [row, col] of down; all 254 codes that are numbers occur.
  static uint8_t code(int64_t row, int64_t col) {
    const auto code = static_cast<uint8_t>((row + col) % 256);
    return (code & 0x7F) == 0x7F ? 0 : code;
  }
  static float scale(int64_t row) { return std::ldexp(1.0F, static_cast<int>(row / 128) - 3); }

  WeightInfo describe(WeightId role) const override {
    const int64_t scales = form_ == WeightScale::kBlock ? kSize / 128 : 1;
    const int64_t scale_rows = form_ == WeightScale::kBlock ? scales : kSize;
    if (role == weights::kUp || role == weights::kDown) {
      return {.count = 1, .rows = kSize, .cols = kSize, .dtype = DType::kF8E4M3};
    }
    if (role == weights::kUp.with(WeightPlane::kScale) ||
        role == weights::kDown.with(WeightPlane::kScale)) {
      return {.count = 1, .rows = scale_rows, .cols = scales, .dtype = DType::kF32};
    }
    return {};
  }
  void read(WeightId role, int64_t /*expert*/, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    constexpr uint8_t kOne = 0x38;
    auto* const codes = reinterpret_cast<uint8_t*>(destination.data());
    auto* const scales = reinterpret_cast<float*>(destination.data());
    int64_t at = 0;
    for (int64_t row = block.row_begin; row < block.row_end; ++row) {
      for (int64_t col = block.col_begin; col < block.col_end; ++col, ++at) {
        if (role == weights::kUp) codes[at] = row == col ? kOne : 0;
        if (role == weights::kDown) codes[at] = code(row, col);
        if (role == weights::kUp.with(WeightPlane::kScale)) scales[at] = 1;
        if (role == weights::kDown.with(WeightPlane::kScale)) {
          scales[at] = scale(form_ == WeightScale::kBlock ? row * 128 : row);
        }
      }
    }
  }

 private:
  WeightScale form_;
};

TEST_F(CudaContainment, EveryCodeOfE4m3_IsReadExactly) {
  const Context context({.device = "cuda:0", .num_threads = 1});
  const DeviceQueue queue(context);
  constexpr int64_t kSize = CodeReader::kSize;
  Tensor unit(DType::kBF16, {kSize, kSize});
  Tensor ids(DType::kI32, {kSize, 1});
  Tensor weights(DType::kF32, {kSize, 1});
  for (int64_t i = 0; i < kSize; ++i) {
    unit.as<uint16_t>()[i * kSize + i] = 0x3F80;
    weights.as<float>()[i] = 1;
  }
  for (const NumberForm& form : testing::number_forms()) {
    const WeightScale scale_form = form.quant.weights;
    if (form.dtype != DType::kF8E4M3 || scale_form == WeightScale::kTensor) continue;
    MoeSpec spec = testing::with_form(make_spec(1, 1, kSize, kSize, form.dtype), form);
    spec.activation = {.name = "relu2_no_mul"};
    spec.has_gate = false;
    const MoeLayer layer =
        MoeLayer::create(context, spec, CodeReader(scale_form), {.max_tokens = kSize});
    Workspace workspace(context, layer.workspace_bytes());
    // Covers the single launch, the streamed and the tiled kernels.
    for (const int64_t count : {int64_t{1}, int64_t{8}, int64_t{16}, kSize}) {
      for (int64_t first = 0; first < kSize; first += count * (count == 1 ? 16 : 1)) {
        SCOPED_TRACE(::testing::Message() << form.name << " " << first << " of " << count);
        std::vector<int64_t> rows;
        for (int64_t row = 0; row < count; ++row) rows.push_back(first + row);
        const DeviceTensor hidden = queue.upload(testing::gather_rows(unit, rows).view());
        const DeviceTensor device_ids = queue.upload(testing::gather_rows(ids, rows).view());
        const DeviceTensor slots = queue.upload(testing::gather_rows(weights, rows).view());
        DeviceTensor device_out = queue.allocate(DType::kBF16, {count, kSize});
        layer.forward({.hidden = hidden.const_view(),
                       .topk_ids = device_ids.const_view(),
                       .topk_weights = slots.const_view(),
                       .out = device_out.view(),
                       .workspace = &workspace,
                       .stream = queue.stream()});
        // The comparison is in bf16, which holds every code times a power of two; float32 would
        // show that 448 times the float nearest to 1 / 448 is not quite 1.
        Tensor rounded(DType::kBF16, {count, kSize});
        queue.download(device_out.const_view(), rounded.view());
        Tensor out(DType::kF32, {count, kSize});
        convert(rounded.const_view(), out.view());
        for (int64_t i = 0; i < count * kSize; ++i) {
          const int64_t row = i % kSize;
          const uint8_t code = CodeReader::code(row, first + i / kSize);
          ASSERT_EQ(out.as<float>()[i], e4m3_to_float(code) * CodeReader::scale(row))
              << "code " << int{code} << " of row " << row;
        }
      }
    }
  }
}

}  // namespace
}  // namespace conclave
