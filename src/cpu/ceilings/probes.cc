#include "cpu/ceilings/probes.h"

#include <array>

namespace conclave::inline v0::cpu::ceilings {
namespace {

bool lacks_avx_vnni() { return !has_avx_vnni(); }

constexpr std::array kRateProbes = {
    RateProbe{Isa::kScalar, Arithmetic::kF32Fma, &kF32Scalar},
    RateProbe{Isa::kAvx2, Arithmetic::kF32Fma, &kF32FmaAvx2},
    RateProbe{Isa::kAvx2, Arithmetic::kInt8Dot, &kInt8DotAvxVnni, has_avx_vnni},
    RateProbe{Isa::kAvx2, Arithmetic::kInt8Dot, &kInt8DotAvx2, lacks_avx_vnni},
    RateProbe{Isa::kAvx512, Arithmetic::kF32Fma, &kF32FmaAvx512},
    RateProbe{Isa::kAvx512Vnni, Arithmetic::kInt8Dot, &kInt8DotAvx512},
    RateProbe{Isa::kAvx512Bf16, Arithmetic::kDpBf16, &kDpBf16Avx512},
    RateProbe{Isa::kAmx, Arithmetic::kAmxBf16, &kAmxBf16},
    RateProbe{Isa::kAmx, Arithmetic::kInt8Dot, &kInt8DotAmx},
};

}  // namespace

std::span<const RateProbe> rate_probes() noexcept { return kRateProbes; }

const ReadFunctions& read_functions_for(Isa isa) noexcept {
  if (isa >= Isa::kAvx512) return kReadAvx512;
  return isa >= Isa::kAvx2 ? kReadAvx2 : kReadScalar;
}

}  // namespace conclave::inline v0::cpu::ceilings
