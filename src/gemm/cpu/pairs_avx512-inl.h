// Codes become pairs of bf16 by tables of their bytes; sums of bf16. Included by simd-inl.h only.
//
// A row of a panel has one k, and a lane of a pair needs two: a permutation of the bytes of two
// rows sets them out, so that a second one looks the codes up.
#pragma once

#include "gemm/cpu/simd_avx512-inl.h"
#include "quant/code_values.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// A vector of bytes, by their number.
struct ByteVector {
  alignas(64) uint8_t of[64];
  CONCLAVE_KERNEL_INLINE __m512i load() const { return _mm512_load_si512(of); }
};

// Where the codes of 16-bit lanes lie among the bytes of two rows of 32: of column first + i / 2,
// the first row's in even lanes. Upper bytes of lanes do not matter.
consteval ByteVector nibble_places(int first) {
  ByteVector places{};
  for (int i = 0; i < 32; ++i) {
    places.of[2 * i] = static_cast<uint8_t>(first + i / 2 + i % 2 * 32);
  }
  return places;
}

// Where they lie among those of two rows of 64, in the order that unpacking bytes wants: the lower
// halves of 16 bytes have columns of [first, first + 16), the upper ones the next 16.
consteval ByteVector byte_places(int first) {
  ByteVector places{};
  for (int i = 0; i < 64; ++i) {
    const int column = first + i / 16 * 4 + i % 8 / 2 + i / 8 % 2 * 16;
    places.of[i] = static_cast<uint8_t>(column + i % 2 * 64);
  }
  return places;
}

// Lanes of all 64 columns, in their order.
struct PairRow {
  Vec of[4];

  static CONCLAVE_KERNEL_INLINE PairRow zero() {
    return {{Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()}};
  }
  static CONCLAVE_KERNEL_INLINE PairRow load(const uint32_t (&lanes)[64]) {
    return {
        {Vec::load(lanes), Vec::load(lanes + 16), Vec::load(lanes + 32), Vec::load(lanes + 48)}};
  }
  CONCLAVE_KERNEL_INLINE void store(uint32_t (&lanes)[64]) const {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) of[j].store(lanes + 16 * j);
  }
  // Zeros in place of what is not of k in [begin, end), for a row of k and k + 1.
  CONCLAVE_KERNEL_INLINE void keep(int64_t k, int64_t begin, int64_t end) {
    const uint32_t mask = (k >= begin ? 0xffffU : 0U) | (k + 1 < end ? 0xffff0000U : 0U);
    const __m512i lanes = _mm512_set1_epi32(static_cast<int>(mask));
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i bits = _mm512_castps_si512(of[j].value);
      of[j].value = _mm512_castsi512_ps(_mm512_and_si512(bits, lanes));
    }
  }
};

template <class Format, int kTerm, int kBits = Format::kBits>
class PairDecoder;

template <class Format, int kTerm>
class PairDecoder<Format, kTerm, 4> {
 public:
  static constexpr int64_t kPairBytes = 2 * Format::kBits * 8;

  CONCLAVE_KERNEL_INLINE PairDecoder() {
    constexpr const quant::Bf16Bytes& kBytes = quant::kBf16ByCode<Format, kTerm>;
    const auto load = [](const uint8_t* bytes) __attribute__((always_inline)) {
      return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    };
    const __m256i values =
        _mm256_or_si256(load(kBytes.low), _mm256_slli_epi16(load(kBytes.high), 8));
    // Twice, since the permutation reads 5 bits and only 4 are the code's.
    values_ = _mm512_broadcast_i64x4(values);
    static constexpr ByteVector kFirst = nibble_places(0);
    static constexpr ByteVector kSecond = nibble_places(16);
    first_ = kFirst.load();
    second_ = kSecond.load();
  }

  // The pairs of two neighbouring rows. It reads both; what follows the last row of a panel are
  // scales.
  CONCLAVE_KERNEL_INLINE PairRow load(const std::byte* codes) const {
    const __m512i bytes = _mm512_loadu_si512(codes);
    const __m512i first = _mm512_permutexvar_epi8(first_, bytes);
    const __m512i second = _mm512_permutexvar_epi8(second_, bytes);
    return {{look_up(first), look_up(second), look_up(_mm512_srli_epi16(first, 4)),
             look_up(_mm512_srli_epi16(second, 4))}};
  }

 private:
  CONCLAVE_KERNEL_INLINE Vec look_up(__m512i codes) const {
    return {_mm512_castsi512_ps(_mm512_permutexvar_epi16(codes, values_))};
  }

  __m512i values_;
  __m512i first_;
  __m512i second_;
};

// The half bytes, and the upper two bits, of such codes lie so in two rows of codes of 6 bits:
// among those of the first 64 bytes and, from 64 on, of the last 64; the others' among the last 64.
consteval ByteVector half_places() {
  ByteVector places{};
  for (int i = 0; i < 64; ++i) {
    const int byte = byte_places(0).of[i] % 64 + i % 2 * 48;
    places.of[i] = static_cast<uint8_t>(byte < 64 ? byte : byte - 32 + 64);
  }
  return places;
}
consteval ByteVector upper_places() {
  ByteVector places{};
  for (int i = 0; i < 64; ++i) {
    const int column = byte_places(0).of[i] % 64;
    const int byte = 32 + column / 16 * 8 + column % 8 + i % 2 * 48;
    places.of[i] = static_cast<uint8_t>(byte - 32);
  }
  return places;
}

template <class Format, int kTerm>
class PairDecoder<Format, kTerm, 6> {
 public:
  static constexpr int64_t kPairBytes = 2 * Format::kBits * 8;

  CONCLAVE_KERNEL_INLINE PairDecoder() {
    constexpr const quant::Bf16Bytes& kBytes = quant::kBf16ByCode<Format, kTerm>;
    low_ = _mm512_loadu_si512(kBytes.low);
    high_ = _mm512_loadu_si512(kBytes.high);
    static constexpr ByteVector kHalves = half_places();
    static constexpr ByteVector kUppers = upper_places();
    halves_ = kHalves.load();
    uppers_ = kUppers.load();
  }

  // The pairs of two neighbouring rows. It reads both; what follows the last row of a panel are
  // scales.
  CONCLAVE_KERNEL_INLINE PairRow load(const std::byte* codes) const {
    const __m512i begin = _mm512_loadu_si512(codes);
    const __m512i end = _mm512_loadu_si512(codes + kPairBytes - 64);
    const __m512i half = _mm512_permutex2var_epi8(begin, halves_, end);
    // Columns from 8 to 15, and from 24 to 31, are the second of their bytes.
    const __m512i upper = _mm512_srlv_epi64(_mm512_permutexvar_epi8(uppers_, end),
                                            _mm512_set_epi64(2, 2, 2, 2, 0, 0, 0, 0));
    PairRow row;
    look_up(join(half, _mm512_slli_epi16(upper, 4)), row.of[0], row.of[1]);
    look_up(join(_mm512_srli_epi16(half, 4), upper), row.of[2], row.of[3]);
    return row;
  }

 private:
  // A permutation reads 6 bits: those above may be anything.
  static CONCLAVE_KERNEL_INLINE __m512i join(__m512i half, __m512i upper) {
    constexpr int kFirstSays = 0xca;  // a ? b : c
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8(0xf), half, upper, kFirstSays);
  }
  CONCLAVE_KERNEL_INLINE void look_up(__m512i codes, Vec& first, Vec& second) const {
    const __m512i low = _mm512_permutexvar_epi8(codes, low_);
    const __m512i high = _mm512_permutexvar_epi8(codes, high_);
    first.value = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high));
    second.value = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
  }

  __m512i low_;
  __m512i high_;
  __m512i halves_;
  __m512i uppers_;
};

template <class Format, int kTerm>
class PairDecoder<Format, kTerm, 8> {
 public:
  static constexpr int64_t kPairBytes = 2 * Format::kBits * 8;

  CONCLAVE_KERNEL_INLINE PairDecoder() {
    constexpr const quant::Bf16Bytes& kBytes = quant::kBf16ByCode<Format, kTerm>;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      low_[i] = _mm512_loadu_si512(kBytes.low + 64 * i);
      high_[i] = _mm512_loadu_si512(kBytes.high + 64 * i);
    }
    static constexpr ByteVector kFirst = byte_places(0);
    static constexpr ByteVector kSecond = byte_places(32);
    first_ = kFirst.load();
    second_ = kSecond.load();
  }

  CONCLAVE_KERNEL_INLINE PairRow load(const std::byte* codes) const {
    const __m512i even = _mm512_loadu_si512(codes);
    const __m512i odd = _mm512_loadu_si512(codes + 64);
    PairRow row;
    look_up(_mm512_permutex2var_epi8(even, first_, odd), row.of[0], row.of[1]);
    look_up(_mm512_permutex2var_epi8(even, second_, odd), row.of[2], row.of[3]);
    return row;
  }

 private:
  // A permutation reads 7 bits: the eighth is the sign, or says which of two tables to take.
  CONCLAVE_KERNEL_INLINE void look_up(__m512i codes, Vec& first, Vec& second) const {
    __m512i low = _mm512_permutex2var_epi8(low_[0], codes, low_[1]);
    __m512i high = _mm512_permutex2var_epi8(high_[0], codes, high_[1]);
    if constexpr (quant::has_sign_bit<Format>()) {
      constexpr int kOrOfAnd = 0xf8;  // a | (b & c)
      high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-128), kOrOfAnd);
    } else {
      const __mmask64 upper = _mm512_movepi8_mask(codes);
      low = _mm512_mask_mov_epi8(low, upper, _mm512_permutex2var_epi8(low_[2], codes, low_[3]));
      high = _mm512_mask_mov_epi8(high, upper, _mm512_permutex2var_epi8(high_[2], codes, high_[3]));
    }
    first.value = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high));
    second.value = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
  }

  __m512i low_[4];
  __m512i high_[4];
  __m512i first_;
  __m512i second_;
};

// Values of bf16: 32 neighbours together, then those `stride` values on.
struct Bf16Values {
  const uint16_t* first;
  int64_t stride;
};

// The sums of bf16 values over some spans of k, each of which adds them up in the same order.
inline constexpr int kSumsTogether = 16;
class LaneSums {
 public:
  // Span `i` is k of [begin, end).
  CONCLAVE_KERNEL_INLINE void set(int i, const Bf16Values& values, int64_t begin, int64_t end) {
    __m512 sums = _mm512_setzero_ps();
    if ((begin | end) % 32 == 0) {
      for (int64_t k = begin; k < end; k += 32) {
        sums = add(sums, _mm512_loadu_si512(values.first + k / 32 * values.stride));
      }
    } else {
      for (int64_t block = begin / 32; block * 32 < end; ++block) {
        const int64_t before = begin - block * 32;
        const int64_t rest = end - block * 32;
        __mmask32 mask = 0xffffffffU;
        if (before > 0) mask &= 0xffffffffU << before;
        if (rest < 32) mask &= 0xffffffffU >> (32 - rest);
        sums = add(sums, _mm512_maskz_loadu_epi16(mask, values.first + block * values.stride));
      }
    }
    lanes_[i] = sums;
  }

  // Folds the lanes of all spans at once: halves, quarters, pairs, neighbours.
  CONCLAVE_KERNEL_INLINE Vec fold() const {
    const __m512 low = halve_pairs(0);
    const __m512 high = halve_pairs(8);
    return {_mm512_add_ps(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xdd))};
  }

 private:
  static CONCLAVE_KERNEL_INLINE __m512 add(__m512 sums, __m512i x) {
    const auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
    return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(x), ones);
  }
  // Where folding leaves the sum in lane i.
  CONCLAVE_KERNEL_INLINE __m512 lanes_of(int place) const {
    return lanes_[place % 4 * 4 + place / 4];
  }
  CONCLAVE_KERNEL_INLINE __m512 halve(int place) const {
    const __m512 a = lanes_of(place);
    const __m512 b = lanes_of(place + 1);
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
  CONCLAVE_KERNEL_INLINE __m512 halve_quarters(int place) const {
    const __m512 a = halve(place);
    const __m512 b = halve(place + 2);
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  CONCLAVE_KERNEL_INLINE __m512 halve_pairs(int place) const {
    const __m512d a = _mm512_castps_pd(halve_quarters(place));
    const __m512d b = _mm512_castps_pd(halve_quarters(place + 4));
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }

  __m512 lanes_[kSumsTogether];
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
