// Products of rows with the factors of an adapter, one set of functions per instruction set.
#pragma once

#include "cpu/isa.h"

#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::experts {

inline constexpr int64_t kMostTermRows = 4;

// Some rows of one adapter and their terms. 32 columns of a row lie together, the next 32
// `block_bytes` on; columns from k to the next multiple of 32 are zeros.
struct TermsTask {
  const std::byte* const* rows = nullptr;
  float* const* terms = nullptr;  // `count` for each row
  int64_t num_rows = 0;           // at most kMostTermRows
  int64_t block_bytes = 0;
  int64_t k = 0;
  const std::byte* a = nullptr;  // [count, k rounded up to 32]
  int64_t count = 0;
};

// 32 sums of one row: sums[c] += sum over r of terms[r] * b[r, c].
struct DeltaTask {
  const float* terms = nullptr;
  int64_t rank = 0;
  const std::byte* b = nullptr;  // [rank, 32]
  float* sums = nullptr;
};

// Every term and sum has one order of additions, whatever rows come with it.
struct AdapterFunctions {
  void (*terms)(const TermsTask& task) noexcept = nullptr;
  void (*add_delta)(const DeltaTask& task) noexcept = nullptr;
};

// For rows of kF32 or kBF16 and factors of kF32, kF16 or kBF16.
AdapterFunctions adapter_functions(cpu::Isa isa, DType rows, DType factors) noexcept;

AdapterFunctions adapter_functions_avx2(DType rows, DType factors) noexcept;
AdapterFunctions adapter_functions_avx512(DType rows, DType factors) noexcept;
AdapterFunctions adapter_functions_scalar(DType rows, DType factors) noexcept;

}  // namespace conclave::inline v0::experts
