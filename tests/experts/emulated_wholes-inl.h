// Products of whole numbers over emulated_simd-inl.h, in scalar code. Only gemm/cpu/simd-inl.h may
// include it.
#pragma once

#include "experts/emulated_simd-inl.h"
#include "gemm/cpu/code_row.h"
#include "gemm/cpu/whole_format-inl.h"

#include <algorithm>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

inline constexpr int kMaxIntegerTileRows = 6;

struct Ints {
  int32_t value[Vec::kLanes];

  template <class Function>
  static Ints each(const Function& function) {
    Ints result;
    for (int i = 0; i < Vec::kLanes; ++i) result.value[i] = function(i);
    return result;
  }
  static Ints broadcast(int32_t x) {
    return each([&](int) { return x; });
  }
  static Ints load(const void* p) {
    Ints result;
    std::memcpy(result.value, p, sizeof(result.value));
    return result;
  }
  void store(void* p) const { std::memcpy(p, value, sizeof(value)); }
  static Ints add(Ints a, Ints b) {
    return each([&](int i) { return a.value[i] + b.value[i]; });
  }
  static Ints both(Ints a, Ints b) {
    return each([&](int i) { return a.value[i] & b.value[i]; });
  }
  Vec to_floats() const {
    return Vec::each([&](int i) { return static_cast<float>(value[i]); });
  }
  template <class Weights>
  void add_products(Ints weights, Ints codes) {
    for (int i = 0; i < Vec::kLanes; ++i) {
      int8_t row[4];
      uint8_t column[4];
      std::memcpy(row, codes.value + i, sizeof(row));
      std::memcpy(column, weights.value + i, sizeof(column));
      value[i] = testing::byte_tile_product(value[i], row, column, 1);
    }
  }
};

struct Quads {
  static constexpr int kSlices = 1;
  Ints value[4];
};

// Lanes have the columns in their order.
template <class Format>
struct WholeWeights : WholeFormat<Format> {
  static Quads load_rows(const std::byte* r0, const std::byte* r1, const std::byte* r2,
                         const std::byte* r3, int /*slice*/) {
    uint8_t bytes[64][4];
    for (int c = 0; c < 64; ++c) {
      bytes[c][0] = number_of(r0, c);
      bytes[c][1] = number_of(r1, c);
      bytes[c][2] = number_of(r2, c);
      bytes[c][3] = number_of(r3, c);
    }
    Quads quads;
    std::memcpy(quads.value, bytes, sizeof(bytes));
    return quads;
  }
  static void swap_order(Vec (&)[4]) {}

 private:
  static uint8_t number_of(const std::byte* row, int column) {
    return static_cast<uint8_t>(WholeWeights::number(code_in_row<Format::kBits>(row, column)));
  }
};

inline uint32_t largest_bits(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, __builtin_bit_cast(uint32_t, values[i]) & 0x7fffffffU);
  }
  return largest;
}
inline void code_group(const float* values, int64_t count, float scale, std::byte* codes) {
  for (int64_t i = 0; i < count; ++i) {
    float code = 0;
    if (!std::isnan(scale)) {
      code = std::nearbyint(std::clamp(values[i] / scale, kLeastRowCode, kLargestRowCode));
    }
    codes[i] = static_cast<std::byte>(static_cast<int8_t>(code));
  }
}
inline int32_t sum_codes(const std::byte* codes, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<int8_t>(codes[i]);
  return sum;
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
