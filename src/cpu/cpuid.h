// What CPUID and XGETBV say, as plain data, so that every decision on it can be tested for any CPU.
#pragma once

#include "cpu/isa.h"

#include "conclave/error.h"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0::cpu {

// The registers that hold the features in kFeatures. Zero where the leaf does not exist.
struct CpuidWords {
  uint32_t leaf1_ecx = 0;
  uint32_t leaf7_ebx = 0;
  uint32_t leaf7_ecx = 0;
  uint32_t leaf7_edx = 0;
  uint32_t leaf7_1_eax = 0;
  uint64_t xcr0 = 0;  // register files that the OS saves; 0 without OSXSAVE
};

struct Feature {
  std::string_view name;  // as in /proc/cpuinfo
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

// Of this machine, read once.
const CpuidWords& cpuid_words();
const CpuIdentity& cpu_identity();

// Pure: family, model and stepping of CPUID leaf 1's EAX, extended fields applied.
CpuIdentity decode_signature(uint32_t leaf1_eax);
// Pure: whether CPU and OS offer `isa`, all but the permission that AMX needs besides.
Support offered(const CpuidWords& words, Isa isa);
// Linux gives the 8 KiB of tile state only to processes that ask, once, for all their threads.
Support request_tiles();

}  // namespace conclave::inline v0::cpu
