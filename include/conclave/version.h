// Version macros, the symbol-export macro, and the facts of this build.
#pragma once

#define CONCLAVE_VERSION_MAJOR 0
#define CONCLAVE_VERSION_MINOR 2
#define CONCLAVE_VERSION_PATCH 0
#define CONCLAVE_VERSION_STRING "0.2.0"

// The build sets CONCLAVE_STATIC for a static library (and for its consumers, through the exported
// target), and CONCLAVE_BUILDING while the library itself compiles.
#if defined(CONCLAVE_STATIC)
#define CONCLAVE_API
#else
#define CONCLAVE_API __attribute__((visibility("default")))
#endif

namespace conclave::inline v0 {

// All strings live as long as the process.
struct BuildInfo {
  const char* version;     // "0.2.0"
  const char* commit;      // short git hash, "unknown" outside a git checkout
  const char* compiler;    // "GNU 12.2.0"
  const char* build_type;  // "Release"
  const char* features;    // comma-separated: "cpu,avx2,avx512,avx512_bf16,amx"
};

CONCLAVE_API const BuildInfo& build_info() noexcept;

}  // namespace conclave::inline v0
