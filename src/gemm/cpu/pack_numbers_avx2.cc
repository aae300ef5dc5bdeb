#define CONCLAVE_SIMD_AVX2

#include "gemm/cpu/pack_numbers-inl.h"
#include "gemm/cpu/pack_numbers.h"
#include "gemm/cpu/square_avx2-inl.h"

namespace conclave::inline v0::gemm {

bool pack_numbers_avx2(const NumberPlane& plane, const float* const* columns,
                       std::byte* packed) noexcept {
  return isa_avx2::pack_by_squares<isa_avx2::Square8>(plane, columns, packed);
}

}  // namespace conclave::inline v0::gemm
