// Instruction sets and arithmetics of the CPU rows, and which of them this machine may use.
#pragma once

#include "conclave/error.h"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0::cpu {

// In order of capability: each includes the ones before it.
enum class Isa : uint8_t { kScalar, kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx };

// How products with weights are accumulated; a plan uses one.
enum class Arithmetic : uint8_t {
  kF32Fma,   // widen to float32, one fused multiply-add per element of k, in ascending k
  kDpBf16,   // vdpbf16ps: pairs of bf16 products
  kAmxBf16,  // tdpbf16ps tiles
  kInt8Dot,  // whole numbers: codes of weights times int8 codes of rows
};
// Whether it multiplies whole numbers, which only codes are.
constexpr bool multiplies_integers(Arithmetic arithmetic) noexcept {
  return arithmetic == Arithmetic::kInt8Dot;
}

std::string_view to_string(Isa isa) noexcept;
constexpr std::string_view to_string(Arithmetic arithmetic) noexcept {
  switch (arithmetic) {
    case Arithmetic::kF32Fma:
      return "f32_fma";
    case Arithmetic::kDpBf16:
      return "dpbf16";
    case Arithmetic::kAmxBf16:
      return "amx_bf16";
    case Arithmetic::kInt8Dot:
      return "int8_dot";
  }
  return "unknown";
}
// Throw Error(kUnknownName) listing the names.
Isa parse_isa(std::string_view name);
Arithmetic parse_arithmetic(std::string_view name);

// Whether CPUID reports it and the OS saves its registers. For AMX this call also requests the tile
// permission, once.
Support usable(Isa isa);
// The best instruction set that is usable.
Isa best_isa();

// Whether CPUID reports avx512_vbmi. All CPUs with AVX-512-BF16 but Cooper Lake have it.
bool permutes_bytes();
// Whether CPUID reports avx_vnni: vpdpbusd for 256 bits, which CPUs with AVX2 alone may have, and
// those with AVX-512 may lack.
bool has_avx_vnni();

// A choice from the CPU table: the fastest arithmetic for bf16 weights on a CPU family and model.
// `reason` names the table's row.
struct ArithmeticChoice {
  Arithmetic arithmetic = Arithmetic::kF32Fma;
  std::string_view reason;
};
struct CpuId {
  std::string_view vendor;  // "GenuineIntel", "AuthenticAMD"
  int32_t family = 0;
  int32_t model = 0;
};
CpuId cpu_id();
// Pure, so that it is tested for other CPUs. `isa` is the best that is allowed.
ArithmeticChoice choose_arithmetic(const CpuId& cpu, Isa isa);
// The same for weights and rows that are codes with whole numbers as values.
ArithmeticChoice choose_integer_arithmetic(Isa isa);

// Whether a thread that reads weights once, straight from memory, gains by prefetch instructions:
// it does if the CPU's own prefetcher alone stays below the read ceiling. Pure, by the same kind of
// table.
bool fetch_instructions_speed_streams(const CpuId& cpu);

}  // namespace conclave::inline v0::cpu
