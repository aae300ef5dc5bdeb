// The results of CPUID and XGETBV as plain data, so that every decision on them can be tested for
// any CPU.
#pragma once

#include "cpu/isa.h"

#include "conclave/error.h"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0::cpu {

// The registers that hold the features in kFeatures. A register is zero if its leaf does not exist.
struct CpuidWords {
  uint32_t leaf1_ecx = 0;
  uint32_t leaf7_ebx = 0;
  uint32_t leaf7_ecx = 0;
  uint32_t leaf7_edx = 0;
  uint32_t leaf7_1_eax = 0;
  uint64_t xcr0 = 0;  // register files that the OS saves; 0 without OSXSAVE
};

struct Feature {
  std::string_view name;  // the name in /proc/cpuinfo
  uint32_t CpuidWords::*word;
  int bit;
};
// Every feature that a row needs or that `cpu_info` reports.
std::span<const Feature> features() noexcept;
bool has(const CpuidWords& words, const Feature& feature) noexcept;

struct CpuIdentity {
  std::string vendor;
  std::string brand;
  int32_t family = 0;
  int32_t model = 0;
  int32_t stepping = 0;
};

// Describe this machine; read once.
const CpuidWords& cpuid_words();
const CpuIdentity& cpu_identity();

// Pure: decodes family, model and stepping from CPUID leaf 1's EAX, extended fields applied.
CpuIdentity decode_signature(uint32_t leaf1_eax);
// Pure: whether CPU and OS offer `isa`, apart from the permission that AMX also needs.
Support offered(const CpuidWords& words, Isa isa);
// The same for permutations of bytes: avx512_vbmi.
Support offers_byte_permutes(const CpuidWords& words);
// The same for dot products of bytes without AVX-512: avx_vnni.
Support offers_avx_vnni(const CpuidWords& words);
// Requests AMX tile state: Linux gives its 8 KiB only to processes that ask, once for all threads.
Support request_tiles();

}  // namespace conclave::inline v0::cpu
