// The one place where exceptions become codes: every function of the interface runs its body in
// `guarded`.
#pragma once

#include "conclave/c/base.h"
#include "conclave/error.h"

#include <optional>
#include <utility>

namespace conclave::inline v0::capi {

// The code of that number, if it is one.
std::optional<ErrorCode> find_code(conclave_status status) noexcept;

// Keeps the exception that is being handled as this thread's last error.
conclave_status record_exception() noexcept;

template <class Body>
conclave_status guarded(Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return CONCLAVE_OK;
  } catch (...) {
    return record_exception();
  }
}

}  // namespace conclave::inline v0::capi
