#include "experts/cpu/adapters/functions.h"

#include "core/checked.h"
#include "core/float_convert.h"

#include <cstring>

namespace conclave::inline v0::experts {
namespace {

struct F32 {
  static constexpr int64_t kBytes = 4;
  static float load(const std::byte* p) {
    float value;
    std::memcpy(&value, p, sizeof(value));
    return value;
  }
};
template <float (*kWiden)(uint16_t)>
struct Half {
  static constexpr int64_t kBytes = 2;
  static float load(const std::byte* p) {
    uint16_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    return kWiden(bits);
  }
};
using F16 = Half<f16_to_float>;
using Bf16 = Half<bf16_to_float>;

template <class Row, class Factor>
void compute_terms(const TermsTask& task) noexcept {
  const int64_t padded = round_up(task.k, 32);
  for (int64_t row = 0; row < task.num_rows; ++row) {
    const std::byte* const x = task.rows[row];
    for (int64_t t = 0; t < task.count; ++t) {
      const std::byte* const a = task.a + t * padded * Factor::kBytes;
      float sum = 0;
      for (int64_t c = 0; c < task.k; ++c) {
        sum += Row::load(x + c / 32 * task.block_bytes + c % 32 * Row::kBytes) *
               Factor::load(a + c * Factor::kBytes);
      }
      task.terms[row][t] = sum;
    }
  }
}

template <class Factor>
void add_delta(const DeltaTask& task) noexcept {
  for (int64_t c = 0; c < 32; ++c) {
    float sum = 0;
    for (int64_t r = 0; r < task.rank; ++r) {
      sum += task.terms[r] * Factor::load(task.b + (r * 32 + c) * Factor::kBytes);
    }
    task.sums[c] += sum;
  }
}

template <class Row>
AdapterFunctions functions_of(DType factors) noexcept {
  switch (factors) {
    case DType::kF16:
      return {&compute_terms<Row, F16>, &add_delta<F16>};
    case DType::kBF16:
      return {&compute_terms<Row, Bf16>, &add_delta<Bf16>};
    default:
      return {&compute_terms<Row, F32>, &add_delta<F32>};
  }
}

}  // namespace

AdapterFunctions adapter_functions_scalar(DType rows, DType factors) noexcept {
  return rows == DType::kBF16 ? functions_of<Bf16>(factors) : functions_of<F32>(factors);
}

AdapterFunctions adapter_functions(cpu::Isa isa, DType rows, DType factors) noexcept {
  if (isa >= cpu::Isa::kAvx512) return adapter_functions_avx512(rows, factors);
  if (isa >= cpu::Isa::kAvx2) return adapter_functions_avx2(rows, factors);
  return adapter_functions_scalar(rows, factors);
}

}  // namespace conclave::inline v0::experts
