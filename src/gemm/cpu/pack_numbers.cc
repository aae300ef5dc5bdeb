#include "gemm/cpu/pack_numbers.h"

namespace conclave::inline v0::gemm {

NumbersFunction numbers_function(cpu::Isa isa) noexcept {
  if (isa >= cpu::Isa::kAvx512) return pack_numbers_avx512;
  return isa >= cpu::Isa::kAvx2 ? pack_numbers_avx2 : nullptr;
}

}  // namespace conclave::inline v0::gemm
