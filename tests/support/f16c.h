// Whether this machine converts to float16 itself: clang 16's __builtin_cpu_supports does not know
// the name.
#pragma once

#include <cpuid.h>

namespace conclave::testing {

inline bool machine_has_f16c() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

}  // namespace conclave::testing
