// CONCLAVE_DCHECK guards our own invariants in debug builds; bad input is an Error instead.
#pragma once

namespace conclave::inline v0 {
[[noreturn]] void dcheck_failed(const char* condition, const char* file, int line);
}

#if defined(NDEBUG) && !defined(CONCLAVE_FORCE_DCHECK)
#define CONCLAVE_DCHECK(condition) static_cast<void>(0)
#else
#define CONCLAVE_DCHECK(condition) \
  ((condition) ? static_cast<void>(0) : ::conclave::dcheck_failed(#condition, __FILE__, __LINE__))
#endif
