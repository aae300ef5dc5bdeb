#define CONCLAVE_SIMD_AVX512

#include "gemm/cpu/pack_numbers-inl.h"
#include "gemm/cpu/pack_numbers.h"
#include "gemm/cpu/square_avx512-inl.h"

namespace conclave::inline v0::gemm {

bool pack_numbers_avx512(const NumberPlane& plane, const float* const* columns,
                         std::byte* packed) noexcept {
  return isa_avx512::pack_by_squares<isa_avx512::Square16>(plane, columns, packed);
}

}  // namespace conclave::inline v0::gemm
