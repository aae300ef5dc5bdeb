// 16 float32 lanes like those of AVX-512, pairs of bf16 from codes, and the tile instructions, in
// scalar code. Only gemm/cpu/simd-inl.h may include it.
#pragma once

#include "activation/scalar.h"
#include "core/float8.h"
#include "core/float_convert.h"
#include "experts/emulated_tiles.h"
#include "gemm/packed_layout.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig(shape) testing::EmulatedTiles::of_thread().configure(shape)
#define _tile_release() testing::EmulatedTiles::of_thread().release()
#define _tile_zero(tile) testing::EmulatedTiles::of_thread().zero(tile)
#define _tile_loadd(tile, from, stride) testing::EmulatedTiles::of_thread().load(tile, from, stride)
#define _tile_stored(tile, to, stride) testing::EmulatedTiles::of_thread().store(tile, to, stride)
#define _tile_dpbf16ps(sums, rows, weights) \
  testing::EmulatedTiles::of_thread().multiply_bf16(sums, rows, weights)
#define _tile_dpbsud(sums, rows, weights) \
  testing::EmulatedTiles::of_thread().multiply_bytes(sums, rows, weights)

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// The code of a column in a panel's row.
template <int64_t kBits>
uint8_t code_in_row(const std::byte* row, int column) {
  if (kBits == 8) return static_cast<uint8_t>(row[column]);
  const auto pair = static_cast<uint8_t>(row[column % 32]);
  const int half = column < 32 ? pair & 0xf : pair >> 4;
  if (kBits == 4) return static_cast<uint8_t>(half);
  const auto four = static_cast<uint8_t>(row[SixBitRow::byte_of(column)]);
  return static_cast<uint8_t>(half | (four >> SixBitRow::shift_of(column) & 3) << 4);
}

struct Vec {
  static constexpr int kLanes = 16;
  float value[kLanes];

  template <class Function>
  static Vec each(const Function& function) {
    Vec result;
    for (int i = 0; i < kLanes; ++i) result.value[i] = function(i);
    return result;
  }
  // Each lane does what the scalar path does.
  template <class Function>
  static Vec scalar(Vec a, Vec b, Vec c, const Function& function) {
    using activation::ScalarFloat;
    return each([&](int i) {
      return function(ScalarFloat{a.value[i]}, ScalarFloat{b.value[i]}, ScalarFloat{c.value[i]})
          .value;
    });
  }

  static Vec zero() { return broadcast(0.0F); }
  static Vec broadcast(float x) {
    return each([&](int) { return x; });
  }
  static Vec load(const void* p) {
    Vec result;
    std::memcpy(result.value, p, sizeof(result.value));
    return result;
  }
  // Lanes that are pairs of bf16, widened.
  Vec bf16_first() const {
    return each([&](int i) { return bf16_to_float(static_cast<uint16_t>(lane(i))); });
  }
  Vec bf16_second() const {
    return each([&](int i) { return bf16_to_float(static_cast<uint16_t>(lane(i) >> 16)); });
  }
  static Vec load_bf16_first(const void* p) { return load(p).bf16_first(); }
  static Vec load_bf16_second(const void* p) { return load(p).bf16_second(); }
  template <bool kUpper>
  static Vec look_up_u4(const float* table, const void* p) {
    uint8_t codes[kLanes];
    std::memcpy(codes, p, sizeof(codes));
    return each([&](int i) { return table[kUpper ? codes[i] >> 4 : codes[i] & 0xf]; });
  }
  static Vec load_f16(const void* p) {
    uint16_t bits[kLanes];
    std::memcpy(bits, p, sizeof(bits));
    return each([&](int i) { return f16_to_float(bits[i]); });
  }
  static Vec load_power_of_two(const void* p) {
    uint8_t codes[kLanes];
    std::memcpy(codes, p, sizeof(codes));
    return each([&](int i) { return e8m0_to_float(codes[i]); });
  }
  static Vec load_signed_bytes(const void* p) {
    int8_t bytes[kLanes];
    std::memcpy(bytes, p, sizeof(bytes));
    return each([&](int i) { return static_cast<float>(bytes[i]); });
  }
  template <bool kUpper>
  static Vec load_i6(const std::byte* row, int column) {
    return each([&](int i) {
      return static_cast<float>(code_in_row<6>(row, column + i + (kUpper ? 32 : 0)) - 32);
    });
  }
  static Vec add(Vec a, Vec b) {
    return scalar(a, b, b, [](auto x, auto y, auto) { return decltype(x)::add(x, y); });
  }
  static Vec sub(Vec a, Vec b) {
    return scalar(a, b, b, [](auto x, auto y, auto) { return decltype(x)::sub(x, y); });
  }
  static Vec mul(Vec a, Vec b) {
    return scalar(a, b, b, [](auto x, auto y, auto) { return decltype(x)::mul(x, y); });
  }
  static Vec div(Vec a, Vec b) {
    return scalar(a, b, b, [](auto x, auto y, auto) { return decltype(x)::div(x, y); });
  }
  static Vec max(Vec a, Vec b) {
    return scalar(a, b, b, [](auto x, auto y, auto) { return decltype(x)::max(x, y); });
  }
  static Vec min(Vec a, Vec b) {
    return scalar(a, b, b, [](auto x, auto y, auto) { return decltype(x)::min(x, y); });
  }
  static Vec fma(Vec a, Vec b, Vec c) {
    return scalar(a, b, c, [](auto x, auto y, auto z) { return decltype(x)::fma(x, y, z); });
  }
  static Vec negative_magnitude(Vec a) {
    return scalar(a, a, a, [](auto x, auto, auto) { return decltype(x)::negative_magnitude(x); });
  }
  static Vec power_of_two(Vec a) {
    return scalar(a, a, a, [](auto x, auto, auto) { return decltype(x)::power_of_two(x); });
  }
  static Vec select_negative(Vec a, Vec b, Vec c) {
    return scalar(a, b, c,
                  [](auto x, auto y, auto z) { return decltype(x)::select_negative(x, y, z); });
  }

  void accumulate(Vec a, Vec b) { *this = fma(a, b, *this); }
  Vec keep_first(int64_t count) const {
    return each([&](int i) { return i < count ? value[i] : 0.0F; });
  }
  void store(void* p) const { std::memcpy(p, value, sizeof(value)); }
  void store_first(void* p, int64_t count) const {
    std::memcpy(p, value, static_cast<size_t>(count) * sizeof(float));
  }
  uint32_t lane(int i) const { return std::bit_cast<uint32_t>(value[i]); }
  void store_bf16(void* p) const {
    for (int i = 0; i < kLanes; ++i) {
      const uint16_t bits = float_to_bf16(value[i]);
      std::memcpy(static_cast<std::byte*>(p) + 2 * i, &bits, sizeof(bits));
    }
  }
};

inline void prefetch_line(const std::byte*) {}

// Pairs of bf16 as gemm/cpu/pairs_avx512-inl.h makes them, from the values of codes.
struct PairRow {
  Vec of[4];

  static PairRow zero() { return {{Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()}}; }
  void store(uint32_t (&lanes)[64]) const { std::memcpy(lanes, of, sizeof(of)); }
  void keep(int64_t k, int64_t begin, int64_t end) {
    const uint32_t mask = (k >= begin ? 0xffffU : 0U) | (k + 1 < end ? 0xffff0000U : 0U);
    uint32_t lanes[64];
    store(lanes);
    for (uint32_t& lane : lanes) lane &= mask;
    std::memcpy(of, lanes, sizeof(of));
  }
};

template <class Format, int kTerm>
struct PairDecoder {
  static constexpr int64_t kPairBytes = 2 * Format::kBits * 8;

  PairRow load(const std::byte* codes) const {
    uint32_t lanes[64];
    for (int c = 0; c < 64; ++c) {
      lanes[c] = term_of(codes, c) | uint32_t{term_of(codes + kPairBytes / 2, c)} << 16;
    }
    PairRow row;
    std::memcpy(row.of, lanes, sizeof(lanes));
    return row;
  }

 private:
  static uint16_t term_of(const std::byte* row, int column) {
    return kTerms[code_in_row<Format::kBits>(row, column)];
  }

  // The term of each code is there before a kernel takes subnormal numbers for zeros.
  static inline const std::array<uint16_t, 256> kTerms = [] {
    std::array<uint16_t, 256> terms{};
    for (int code = 0; code < 1 << Format::kBits; ++code) {
      const float value = Format::decode(static_cast<uint8_t>(code));
      const uint16_t nearest = float_to_bf16(value);
      const bool leaves_rest = kTerm == 1 && std::isfinite(value);
      terms[static_cast<size_t>(code)] = kTerm == 0 ? nearest
                                         : leaves_rest
                                             ? float_to_bf16(value - bf16_to_float(nearest))
                                             : uint16_t{0};
    }
    return terms;
  }();
};

struct Bf16Values {
  const uint16_t* first;
  int64_t stride;
};
inline constexpr int kSumsTogether = Vec::kLanes;
class LaneSums {
 public:
  void set(int i, const Bf16Values& values, int64_t begin, int64_t end) {
    double sum = 0;
    for (int64_t k = begin; k < end; ++k) {
      sum += double{bf16_to_float(values.first[k / 32 * values.stride + k % 32])};
    }
    sums_[i] = static_cast<float>(sum);
  }
  Vec fold() const { return Vec::load(sums_); }

 private:
  float sums_[kSumsTogether];
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
