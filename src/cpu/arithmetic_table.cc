// The CPU table. Rows are added or changed after measuring both arithmetics in the same register
// tile (6 x 64) on that CPU; `conclave doctor` prints such a measurement.
#include "cpu/isa.h"

#include <algorithm>
#include <array>

namespace conclave::inline v0::cpu {
namespace {

struct ModelRange {
  int32_t first;
  int32_t last;
};

struct ArithmeticRow {
  std::string_view vendor;
  int32_t family;  // or kAnyFamily
  ModelRange models;
  Isa needs;
  Arithmetic arithmetic;
  std::string_view reason;
};

constexpr std::string_view kIntel = "GenuineIntel";
constexpr std::string_view kAmd = "AuthenticAMD";
constexpr int32_t kAnyFamily = -1;
constexpr ModelRange kAnyModel{0, 255};

// The first row that matches wins.
constexpr std::array kRows = {
    // Hypervisors make models up, and tiles are faster by far wherever there are some.
    ArithmeticRow{kIntel, kAnyFamily, kAnyModel, Isa::kAmx, Arithmetic::kAmxBf16,
                  "CPU with AMX: tiles run 16 times the float32 rate"},
    ArithmeticRow{kIntel,
                  6,
                  {143, 143},
                  Isa::kAvx512Bf16,
                  Arithmetic::kF32Fma,
                  "Sapphire Rapids without AMX: vdpbf16ps runs at half the float32 FMA rate"},
    ArithmeticRow{kIntel,
                  6,
                  {207, 207},
                  Isa::kAvx512Bf16,
                  Arithmetic::kF32Fma,
                  "Emerald Rapids without AMX: vdpbf16ps runs at half the float32 FMA rate"},
    ArithmeticRow{kIntel,
                  6,
                  {173, 174},
                  Isa::kAvx512Bf16,
                  Arithmetic::kF32Fma,
                  "Granite Rapids without AMX: vector units as in Emerald Rapids"},
    // Model 85 is Skylake-SP, Cascade Lake and Cooper Lake; only the last has avx512_bf16.
    ArithmeticRow{kIntel,
                  6,
                  {85, 85},
                  Isa::kAvx512Bf16,
                  Arithmetic::kDpBf16,
                  "Cooper Lake: Intel states twice the float32 rate for vdpbf16ps"},
    ArithmeticRow{kAmd,
                  25,
                  {16, 31},
                  Isa::kAvx512Bf16,
                  Arithmetic::kDpBf16,
                  "Zen 4: vdpbf16ps does twice the products of a float32 FMA at the same rate"},
    ArithmeticRow{kAmd,
                  25,
                  {96, 127},
                  Isa::kAvx512Bf16,
                  Arithmetic::kDpBf16,
                  "Zen 4: vdpbf16ps does twice the products of a float32 FMA at the same rate"},
    ArithmeticRow{kAmd,
                  25,
                  {160, 175},
                  Isa::kAvx512Bf16,
                  Arithmetic::kDpBf16,
                  "Zen 4: vdpbf16ps does twice the products of a float32 FMA at the same rate"},
    ArithmeticRow{kAmd, 26, kAnyModel, Isa::kAvx512Bf16, Arithmetic::kDpBf16,
                  "Zen 5: vdpbf16ps measured at 1.96 times the float32 FMA rate"},
};

bool matches(const ArithmeticRow& row, const CpuId& cpu, Isa isa) {
  const bool is_of_family = row.family == kAnyFamily || row.family == cpu.family;
  return row.vendor == cpu.vendor && is_of_family && row.models.first <= cpu.model &&
         cpu.model <= row.models.last && row.needs <= isa;
}

}  // namespace

ArithmeticChoice choose_arithmetic(const CpuId& cpu, Isa isa) {
  if (isa < Isa::kAvx512Bf16) {
    return {Arithmetic::kF32Fma, "the instruction set has no bfloat16 products"};
  }
  const auto* row = std::find_if(kRows.begin(), kRows.end(), [&](const ArithmeticRow& candidate) {
    return matches(candidate, cpu, isa);
  });
  if (row != kRows.end()) return {row->arithmetic, row->reason};
  return {Arithmetic::kF32Fma, "CPU not in the table: float32 products run well on every CPU"};
}

// vpdpbusd multiplies four times as many numbers as a float32 FMA, at the same rate on every CPU
// that has it: 3.9 times measured on Zen 5, 4.2 on Emerald Rapids. Without it, products of bytes in
// 256 bits beat float32 of 256 bits, 1.1 to 2.5 times on Zen 5, but not of 512.
ArithmeticChoice choose_integer_arithmetic(Isa isa) {
  if (isa >= Isa::kAvx512Vnni) {
    return {Arithmetic::kInt8Dot, "vpdpbusd does four times the products of a float32 FMA"};
  }
  if (isa == Isa::kAvx2) {
    return {Arithmetic::kInt8Dot, "products of bytes do more at once than a float32 FMA"};
  }
  return {Arithmetic::kF32Fma, "the instruction set has no faster products of bytes"};
}

// Measured on a Qwen3-30B-A3B layer, one token, two threads, in GB/s with and without: Emerald
// Rapids 31 and 23 of 34; Zen 5 (one thread) 38 and 42 of 42.
bool fetch_instructions_speed_streams(const CpuId& cpu) { return cpu.vendor == kIntel; }

}  // namespace conclave::inline v0::cpu
