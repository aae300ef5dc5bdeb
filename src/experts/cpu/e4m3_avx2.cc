#define CONCLAVE_SIMD_AVX2

#include "experts/cpu/e4m3_mlp.h"
#include "experts/cpu/e4m3_product-inl.h"

namespace conclave::inline v0::experts {

void e4m3_product_avx2(const E4m3PanelTask& task) noexcept { isa_avx2::e4m3_product(task); }

}  // namespace conclave::inline v0::experts
