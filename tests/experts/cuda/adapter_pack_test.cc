// Where factors of an adapter lie on a GPU: packed by the host, so that every machine can test it.
#include "core/float_convert.h"
#include "experts/cuda/adapters/pack.h"
#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace conclave::testing {
namespace {

using experts::AdapterShape;
using experts::DeviceExpertFactors;
using experts::DeviceFactors;
using experts::ExpertAdapter;

// An element of packed factors; `place` is that of the first byte of `bytes`.
float element(const std::vector<std::byte>& bytes, const std::byte* place, const void* factor,
              int64_t index, bool is_bf16) {
  const auto at = static_cast<size_t>(static_cast<const std::byte*>(factor) - place);
  const size_t size = is_bf16 ? 2 : 4;
  const std::byte* const from = bytes.data() + at + static_cast<size_t>(index) * size;
  if (is_bf16) {
    uint16_t bits;
    std::memcpy(&bits, from, sizeof(bits));
    return bf16_to_float(bits);
  }
  float value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

class Packed {
 public:
  Packed(const ExpertAdapter& expert, const AdapterShape& shape)
      : bytes_(experts::device_adapter_bytes(expert, shape), std::byte{0xAB}),
        factors_(experts::pack_device_adapter(expert, shape, bytes_.data(), kPlace)) {}

  const DeviceExpertFactors& factors() const { return factors_; }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  float at(const void* factor, int64_t index, bool is_bf16) const {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(factor) % 16, 0U);
    return element(bytes_, kPlace, factor, index, is_bf16);
  }

 private:
  // Device memory has other addresses than the host's.
  static inline const std::byte* const kPlace = reinterpret_cast<const std::byte*>(0x7000000);
  std::vector<std::byte> bytes_;
  DeviceExpertFactors factors_;
};

TEST(DeviceAdapterPack, RanksAndColumns_AreFilledUpWithZeros) {
  const Tensor gate_a = random_tensor(DType::kBF16, 3, 10, 1);
  const Tensor gate_b = random_tensor(DType::kBF16, 5, 3, 2);
  const Tensor up_a = random_tensor(DType::kBF16, 9, 10, 3);
  const Tensor up_b = random_tensor(DType::kBF16, 5, 9, 4);
  const ExpertAdapter expert{.gate = {gate_a.const_view(), gate_b.const_view(), 2.0F},
                             .up = {up_a.const_view(), up_b.const_view(), 3.0F},
                             .down = {}};
  const Packed packed(expert, {.hidden_size = 10, .intermediate_size = 5, .dtype = DType::kBF16});
  const DeviceFactors& own = packed.factors().gate_up;
  EXPECT_EQ(own.terms, 8 + 16);
  EXPECT_EQ(own.rank[0], 8);
  EXPECT_EQ(own.rank[1], 16);
  EXPECT_EQ(own.first[1], 8);
  EXPECT_EQ(own.first_of_second_scale, 8);
  EXPECT_EQ(own.scale[0], 2.0F);
  EXPECT_EQ(own.scale[1], 3.0F);
  ASSERT_TRUE(own.is_bf16);
  EXPECT_EQ(packed.factors().down.terms, 0);
  const auto value = [](const Tensor& tensor, int64_t row, int64_t col) {
    const ConstTensorView view = tensor.const_view();
    if (row >= view.shape[0] || col >= view.shape[1]) return 0.0F;
    return bf16_to_float(tensor.as<uint16_t>()[row * view.shape[1] + col]);
  };
  for (int64_t term = 0; term < 24; ++term) {
    for (int64_t col = 0; col < 16; ++col) {
      const float expected = term < 8 ? value(gate_a, term, col) : value(up_a, term - 8, col);
      EXPECT_EQ(packed.at(own.a, term * 16 + col, true), expected) << term << " " << col;
    }
  }
  for (int64_t row = 0; row < 5; ++row) {
    for (int64_t r = 0; r < 16; ++r) {
      if (r < 8) {
        EXPECT_EQ(packed.at(own.b[0], row * 8 + r, true), value(gate_b, row, r));
      }
      EXPECT_EQ(packed.at(own.b[1], row * 16 + r, true), value(up_b, row, r));
    }
  }
}

TEST(DeviceAdapterPack, AFusedA_IsHeldOnce) {
  const Tensor a = random_tensor(DType::kF16, 8, 16, 1);
  const Tensor b = random_tensor(DType::kF16, 24, 8, 2);
  const ExpertAdapter shared{.gate = {a.const_view(), b.const_view(), 1.0F},
                             .up = {a.const_view(), b.const_view(), 1.0F},
                             .down = {}};
  ExpertAdapter apart = shared;
  apart.up.scale = 2.0F;
  const AdapterShape shape{.hidden_size = 16, .intermediate_size = 24, .dtype = DType::kF32};
  const Packed one(shared, shape);
  const Packed two(apart, shape);
  EXPECT_EQ(one.factors().gate_up.terms, 8);
  EXPECT_EQ(one.factors().gate_up.first[1], 0);
  EXPECT_EQ(two.factors().gate_up.terms, 16);
  EXPECT_EQ(two.bytes().size() - one.bytes().size(), 8U * 16 * sizeof(float));
  EXPECT_EQ(one.at(one.factors().gate_up.a, 17, false), f16_to_float(a.as<uint16_t>()[17]));
}

TEST(DeviceAdapterPack, WithoutAGate_BothHalvesAreUp) {
  const Tensor a = random_tensor(DType::kF32, 4, 6, 1);
  const Tensor b = random_tensor(DType::kF32, 7, 4, 2);
  const ExpertAdapter expert{.gate = {}, .up = {a.const_view(), b.const_view(), 0.5F}, .down = {}};
  const Packed packed(expert, {.hidden_size = 6, .intermediate_size = 7, .gated = false});
  const DeviceFactors& own = packed.factors().gate_up;
  EXPECT_EQ(own.b[0], own.b[1]);
  EXPECT_EQ(own.rank[1], 8);
  EXPECT_EQ(own.terms, 8);
  EXPECT_EQ(packed.at(own.b[1], 6 * 8 + 3, false), b.as<float>()[6 * 4 + 3]);
}

}  // namespace
}  // namespace conclave::testing
