// Which code of this library runs on which GPU, as plain values.
#pragma once

#include "conclave/version.h"

#include <compare>
#include <cstdint>
#include <span>
#include <string>

namespace conclave::inline v0::cuda {

// A compute capability: {9, 0} is Hopper.
struct Capability {
  int32_t major = 0;
  int32_t minor = 0;
  friend auto operator<=>(const Capability&, const Capability&) = default;
};
inline constexpr Capability kHopper{9, 0};

// How far the code for an architecture goes.
enum class CodeKind : uint8_t {
  kExact,   // "90a": devices of this capability and no others
  kBinary,  // "80-real": later ones of the same major number too
  kPtx,     // "80-virtual": all later ones, whose driver compiles it when it loads it
};
struct Architecture {
  Capability capability;
  CodeKind kind = CodeKind::kExact;
};

std::string to_string(const Capability& capability);      // "9.0"
std::string to_string(const Architecture& architecture);  // "90a", as the build's option has it

// The architectures that plain kernels were compiled for: all but those of a folder such as sm90,
// which has its own. Empty in a build without CUDA.
std::span<const Architecture> plain_architectures();

// The one whose code a driver takes on a device of this capability; null if none runs there.
const Architecture* code_for(const Capability& device, std::span<const Architecture> compiled);

// Code for architectures before these has no launches that overlap, or no clusters of blocks.
inline constexpr Capability kFirstWithOverlap{9, 0};
inline constexpr Capability kFirstWithClusters{9, 0};

}  // namespace conclave::inline v0::cuda
