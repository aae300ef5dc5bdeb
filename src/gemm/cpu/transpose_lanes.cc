#include "gemm/cpu/transpose_lanes.h"

namespace conclave::inline v0::gemm {

TransposeFunction transpose_function(cpu::Isa isa) noexcept {
  if (isa >= cpu::Isa::kAvx512) return transpose_lanes_avx512;
  return isa >= cpu::Isa::kAvx2 ? transpose_lanes_avx2 : nullptr;
}

}  // namespace conclave::inline v0::gemm
