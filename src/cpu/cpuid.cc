#include "cpu/cpuid.h"

#include <algorithm>
#include <array>
#include <cpuid.h>
#include <cstring>

namespace conclave::inline v0::cpu {
namespace {

constexpr std::array kFeatures = {
    Feature{"sse4_2", &CpuidWords::leaf1_ecx, 20},
    Feature{"fma", &CpuidWords::leaf1_ecx, 12},
    Feature{"f16c", &CpuidWords::leaf1_ecx, 29},
    Feature{"avx", &CpuidWords::leaf1_ecx, 28},
    Feature{"avx2", &CpuidWords::leaf7_ebx, 5},
    Feature{"avx512f", &CpuidWords::leaf7_ebx, 16},
    Feature{"avx512dq", &CpuidWords::leaf7_ebx, 17},
    Feature{"avx512bw", &CpuidWords::leaf7_ebx, 30},
    Feature{"avx512vl", &CpuidWords::leaf7_ebx, 31},
    Feature{"avx512_vbmi", &CpuidWords::leaf7_ecx, 1},
    Feature{"avx512_vnni", &CpuidWords::leaf7_ecx, 11},
    Feature{"avx512_bf16", &CpuidWords::leaf7_1_eax, 5},
    Feature{"avx512_fp16", &CpuidWords::leaf7_edx, 23},
    Feature{"avx_vnni", &CpuidWords::leaf7_1_eax, 4},
    Feature{"amx_tile", &CpuidWords::leaf7_edx, 24},
    Feature{"amx_bf16", &CpuidWords::leaf7_edx, 22},
    Feature{"amx_int8", &CpuidWords::leaf7_edx, 25},
};

constexpr uint64_t kXcr0Ymm = 0x06;      // SSE and AVX state
constexpr uint64_t kXcr0Zmm = 0xe0;      // mask registers, both halves of the zmm registers
constexpr uint64_t kXcr0Tile = 0x60000;  // tile configuration and data

// One step above the row before it.
struct Requirement {
  Isa isa;
  std::array<std::string_view, 4> features;
  uint64_t xcr0;
  std::string_view registers;
};
constexpr std::array kRequirements = {
    Requirement{Isa::kAvx2, {"avx", "avx2", "fma", "f16c"}, kXcr0Ymm, "AVX"},
    Requirement{Isa::kAvx512, {"avx512f", "avx512bw", "avx512vl", "avx512dq"}, kXcr0Zmm, "AVX-512"},
    Requirement{Isa::kAvx512Vnni, {"avx512_vnni"}, kXcr0Zmm, "AVX-512"},
    Requirement{Isa::kAvx512Bf16, {"avx512_bf16"}, kXcr0Zmm, "AVX-512"},
    Requirement{
        Isa::kAmx, {"amx_tile", "amx_bf16", "amx_int8", "avx512_vbmi"}, kXcr0Tile, "AMX tile"},
};

constexpr Requirement kBytePermutes{Isa::kAvx512, {"avx512_vbmi"}, kXcr0Zmm, "AVX-512"};
constexpr Requirement kAvxVnni{Isa::kAvx2, {"avx_vnni"}, kXcr0Ymm, "AVX"};

struct Registers {
  uint32_t eax = 0;
  uint32_t ebx = 0;
  uint32_t ecx = 0;
  uint32_t edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  Registers r;
  if (__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return {};
  return r;
}

uint64_t read_xcr0(uint32_t leaf1_ecx) {
  constexpr uint32_t kOsxsave = 1U << 27;
  if ((leaf1_ecx & kOsxsave) == 0) return 0;
  uint32_t low = 0;
  uint32_t high = 0;
  // The intrinsic would need -mxsave for the whole file.
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

CpuidWords read_words() {
  const Registers leaf1 = cpuid(1);
  const Registers leaf7 = cpuid(7, 0);
  CpuidWords words{.leaf1_ecx = leaf1.ecx,
                   .leaf7_ebx = leaf7.ebx,
                   .leaf7_ecx = leaf7.ecx,
                   .leaf7_edx = leaf7.edx,
                   .xcr0 = read_xcr0(leaf1.ecx)};
  if (leaf7.eax >= 1) words.leaf7_1_eax = cpuid(7, 1).eax;
  return words;
}

void append_text(std::string& text, std::initializer_list<uint32_t> registers) {
  for (const uint32_t value : registers) {
    std::array<char, 4> bytes{};
    std::memcpy(bytes.data(), &value, bytes.size());
    text.append(bytes.data(), bytes.size());
  }
}

std::string trimmed(std::string text) {
  text.erase(std::find(text.begin(), text.end(), '\0'), text.end());
  const size_t first = text.find_first_not_of(' ');
  if (first == std::string::npos) return {};
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

CpuIdentity read_identity() {
  CpuIdentity identity = decode_signature(cpuid(1).eax);
  const Registers vendor = cpuid(0);
  append_text(identity.vendor, {vendor.ebx, vendor.edx, vendor.ecx});
  for (uint32_t leaf = 0x80000002U; leaf <= 0x80000004U; ++leaf) {
    const Registers part = cpuid(leaf);
    append_text(identity.brand, {part.eax, part.ebx, part.ecx, part.edx});
  }
  identity.vendor = trimmed(identity.vendor);
  identity.brand = trimmed(identity.brand);
  return identity;
}

Support offered_step(const CpuidWords& words, const Requirement& need) {
  for (const std::string_view name : need.features) {
    if (name.empty()) continue;
    const auto* feature = std::find_if(kFeatures.begin(), kFeatures.end(),
                                       [&](const Feature& row) { return row.name == name; });
    if (!has(words, *feature)) return Support::no("CPU lacks " + std::string(name));
  }
  if ((words.xcr0 & need.xcr0) != need.xcr0) {
    return Support::no("the OS does not save " + std::string(need.registers) + " registers");
  }
  return Support::yes();
}

}  // namespace

std::span<const Feature> features() noexcept { return kFeatures; }

bool has(const CpuidWords& words, const Feature& feature) noexcept {
  return ((words.*feature.word >> feature.bit) & 1U) != 0;
}

const CpuidWords& cpuid_words() {
  static const CpuidWords words = read_words();
  return words;
}

const CpuIdentity& cpu_identity() {
  static const CpuIdentity identity = read_identity();
  return identity;
}

CpuIdentity decode_signature(uint32_t leaf1_eax) {
  const auto field = [&](int shift, uint32_t mask) {
    return static_cast<int32_t>((leaf1_eax >> shift) & mask);
  };
  CpuIdentity identity;
  identity.stepping = field(0, 0xf);
  identity.family = field(8, 0xf);
  identity.model = field(4, 0xf);
  if (identity.family == 6 || identity.family == 15) identity.model += field(16, 0xf) << 4;
  if (identity.family == 15) identity.family += field(20, 0xff);
  return identity;
}

Support offers_byte_permutes(const CpuidWords& words) { return offered_step(words, kBytePermutes); }

Support offers_avx_vnni(const CpuidWords& words) { return offered_step(words, kAvxVnni); }

Support offered(const CpuidWords& words, Isa isa) {
  for (const Requirement& need : kRequirements) {
    if (need.isa > isa) break;
    if (Support step = offered_step(words, need); !step) return step;
  }
  return Support::yes();
}

}  // namespace conclave::inline v0::cpu
