// The products of adapters over vectors of float32 of one instruction set.
#pragma once

#include "experts/cpu/adapters/functions.h"
#include "gemm/cpu/simd-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

struct LoadF32 {
  static constexpr int64_t kBytes = 4;
  static CONCLAVE_KERNEL_INLINE Vec load(const std::byte* p) { return Vec::load(p); }
};
struct LoadF16 {
  static constexpr int64_t kBytes = 2;
  static CONCLAVE_KERNEL_INLINE Vec load(const std::byte* p) { return Vec::load_f16(p); }
};
struct LoadBf16 {
  static constexpr int64_t kBytes = 2;
  static CONCLAVE_KERNEL_INLINE Vec load(const std::byte* p) { return widen_bf16<Vec>(p); }

 private:
  // A template, so that only the vectors of this instruction set are asked for.
  template <class Vector>
  static CONCLAVE_KERNEL_INLINE Vector widen_bf16(const std::byte* p) {
    if constexpr (Vector::kLanes == 16) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
    } else {
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
    }
  }
};

// Halves are added until one number is left.
CONCLAVE_KERNEL_INLINE float sum_of_lanes(Vec vector) {
  float lanes[Vec::kLanes];
  vector.store(lanes);
  for (int width = Vec::kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// kTerms terms, from `first` on, of kRows rows. Each has a sum of its own over the columns in
// order, so that no bit depends on kRows or kTerms.
template <class Row, class Factor, int kRows, int kTerms>
CONCLAVE_KERNEL_INLINE void terms_tile(const experts::TermsTask& task, int64_t first_row,
                                       int64_t first) {
  const int64_t a_row_bytes = (task.k + 31) / 32 * 32 * Factor::kBytes;
  const std::byte* a = task.a + first * a_row_bytes;
  Vec sums[kRows][kTerms];
  for (auto& row : sums) {
    for (Vec& sum : row) sum = Vec::zero();
  }
  for (int64_t block = 0; block * 32 < task.k; ++block) {
    for (int c = 0; c < 32; c += Vec::kLanes) {
      Vec x[kRows];
      for (int r = 0; r < kRows; ++r) {
        x[r] = Row::load(task.rows[first_row + r] + block * task.block_bytes + c * Row::kBytes);
      }
      for (int t = 0; t < kTerms; ++t) {
        const Vec factor = Factor::load(a + t * a_row_bytes + c * Factor::kBytes);
        for (int r = 0; r < kRows; ++r) sums[r][t] = Vec::fma(x[r], factor, sums[r][t]);
      }
    }
    a += 32 * Factor::kBytes;
  }
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTerms; ++t) {
      task.terms[first_row + r][first + t] = sum_of_lanes(sums[r][t]);
    }
  }
}

template <class Row, class Factor, int kRows, int kTerms>
CONCLAVE_KERNEL_INLINE void terms_of_rows(const experts::TermsTask& task, int64_t first_row) {
  int64_t first = 0;
  for (; first + kTerms <= task.count; first += kTerms) {
    terms_tile<Row, Factor, kRows, kTerms>(task, first_row, first);
  }
  for (; first < task.count; ++first) terms_tile<Row, Factor, kRows, 1>(task, first_row, first);
}

// Tiles have as many sums as hide the latency of an addition and fit the registers.
template <class Row, class Factor>
void compute_terms(const experts::TermsTask& task) noexcept {
  int64_t row = 0;
  if constexpr (Vec::kLanes == 16) {
    for (; row + 4 <= task.num_rows; row += 4) terms_of_rows<Row, Factor, 4, 4>(task, row);
  }
  for (; row + 2 <= task.num_rows; row += 2) terms_of_rows<Row, Factor, 2, 4>(task, row);
  if (row < task.num_rows) terms_of_rows<Row, Factor, 1, 8>(task, row);
}

template <class Factor>
void add_delta(const experts::DeltaTask& task) noexcept {
  constexpr int kVectors = 32 / Vec::kLanes;
  Vec sums[kVectors];
  for (Vec& sum : sums) sum = Vec::zero();
  const std::byte* b = task.b;
  for (int64_t r = 0; r < task.rank; ++r) {
    const Vec term = Vec::broadcast(task.terms[r]);
    for (int v = 0; v < kVectors; ++v) {
      sums[v] = Vec::fma(term, Factor::load(b + v * Vec::kLanes * Factor::kBytes), sums[v]);
    }
    b += 32 * Factor::kBytes;
  }
  for (int v = 0; v < kVectors; ++v) {
    float* const to = task.sums + v * Vec::kLanes;
    Vec::add(Vec::load(to), sums[v]).store(to);
  }
}

template <class Row>
experts::AdapterFunctions functions_of(DType factors) noexcept {
  switch (factors) {
    case DType::kF16:
      return {&compute_terms<Row, LoadF16>, &add_delta<LoadF16>};
    case DType::kBF16:
      return {&compute_terms<Row, LoadBf16>, &add_delta<LoadBf16>};
    default:
      return {&compute_terms<Row, LoadF32>, &add_delta<LoadF32>};
  }
}

CONCLAVE_KERNEL_INLINE experts::AdapterFunctions functions_of(DType rows, DType factors) {
  return rows == DType::kBF16 ? functions_of<LoadBf16>(factors) : functions_of<LoadF32>(factors);
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
