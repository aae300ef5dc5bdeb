// Instruction sets and arithmetics of the CPU rows, and which of them this machine may use.
#pragma once

#include "conclave/error.h"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0::cpu {

// Ascending capability: each includes the ones before it.
enum class Isa : uint8_t { kScalar, kAvx2, kAvx512, kAvx512Bf16, kAmx };

// How products of 16-bit weights are accumulated. One per plan.
enum class Arithmetic : uint8_t {
  kF32Fma,   // widen to float32, one fused multiply-add per element of k, in ascending k
  kDpBf16,   // vdpbf16ps: pairs of bf16 products
  kAmxBf16,  // tdpbf16ps tiles
};

std::string_view to_string(Isa isa) noexcept;
std::string_view to_string(Arithmetic arithmetic) noexcept;
// Throw Error(kUnknownName) listing the names.
Isa parse_isa(std::string_view name);
Arithmetic parse_arithmetic(std::string_view name);

// Whether CPUID has it and the OS saves its registers (for AMX: grants the tile permission, which
// this call requests once).
Support usable(Isa isa);
// The best usable one.
Isa best_isa();

// The CPU table: for bf16 weights, which arithmetic a CPU family and model runs fastest.
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
// Pure: unit-tested for CPUs other than this one. `isa` is the best allowed.
ArithmeticChoice choose_arithmetic(const CpuId& cpu, Isa isa);

// Whether a thread that reads weights once, straight from memory, gains by fetching the next ones
// with instructions: it does where the CPU's own prefetcher alone stays below the read ceiling.
// Pure, by the same kind of table.
bool fetch_instructions_speed_streams(const CpuId& cpu);

}  // namespace conclave::inline v0::cpu
