#include "capi/guard.h"

#include "capi/status_rows.h"
#include "capi/structs.h"
#include "capi/wording.h"

#include "conclave/error.h"

#include <exception>
#include <new>
#include <string>

namespace conclave::inline v0::capi {
namespace {

// The texts may be lost where there is no memory for them; the status never is.
struct LastError {
  conclave_status status = CONCLAVE_OK;
  int32_t peer = -1;
  const char* without_text = "";
  std::string message;
  std::string phase;
  ErrorDetail detail;

  void set(conclave_status code, const char* fallback) noexcept {
    status = code;
    peer = -1;
    without_text = fallback;
    for (std::string* text : {&message, &phase, &detail.what, &detail.file, &detail.tensor,
                              &detail.expected, &detail.found, &detail.limit, &detail.hint}) {
      text->clear();
    }
  }

  void set(const Error& error) noexcept {
    set(static_cast<conclave_status>(error.code()), "the error's text found no memory");
    try {
      message = in_c_words(error.what());
      const ErrorDetail& from = error.detail();
      detail = {.what = in_c_words(from.what),
                .file = from.file,
                .tensor = in_c_words(from.tensor),
                .expected = in_c_words(from.expected),
                .found = in_c_words(from.found),
                .limit = in_c_words(from.limit),
                .hint = in_c_words(from.hint)};
      if (const auto* of_ranks = dynamic_cast<const CommError*>(&error)) {
        peer = of_ranks->peer();
        phase = of_ranks->phase();
      }
    } catch (const std::exception&) {
      message.clear();
    }
  }

  void set(conclave_status code, const char* fallback, const char* what) noexcept {
    set(code, fallback);
    try {
      message = what;
      detail.what = what;
    } catch (const std::exception&) {
      message.clear();
    }
  }

  const char* text() const noexcept { return message.empty() ? without_text : message.c_str(); }
};

thread_local LastError last_error;

}  // namespace

std::optional<ErrorCode> find_code(conclave_status status) noexcept {
  for (const StatusRow& row : kStatusRows) {
    if (row.status == status) return row.code;
  }
  return std::nullopt;
}

conclave_status record_exception() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    last_error.set(error);
  } catch (const std::bad_alloc&) {
    last_error.set(CONCLAVE_ERROR_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    last_error.set(CONCLAVE_ERROR_INTERNAL, "an error of the standard library", error.what());
  } catch (...) {
    last_error.set(CONCLAVE_ERROR_INTERNAL, "an exception of another library");
  }
  return last_error.status;
}

}  // namespace conclave::inline v0::capi

using conclave::capi::last_error;

// A struct of a wrong size is told by the status alone: the error that is asked for must stay.
conclave_status conclave_last_error(conclave_error* error) noexcept {
  if (error == nullptr) return CONCLAVE_ERROR_NULL_POINTER;
  if (reinterpret_cast<uintptr_t>(error) % alignof(conclave_error) != 0) {
    return CONCLAVE_ERROR_MISALIGNED;
  }
  if (!conclave::capi::is_possible_size(error->struct_size)) return CONCLAVE_ERROR_INVALID_ARGUMENT;
  const conclave::ErrorDetail& detail = last_error.detail;
  conclave::capi::fill(error, {.struct_size = 0,
                               .status = last_error.status,
                               .peer = last_error.peer,
                               .message = last_error.text(),
                               .what = detail.what.c_str(),
                               .file = detail.file.c_str(),
                               .tensor = detail.tensor.c_str(),
                               .expected = detail.expected.c_str(),
                               .found = detail.found.c_str(),
                               .limit = detail.limit.c_str(),
                               .hint = detail.hint.c_str(),
                               .phase = last_error.phase.c_str()});
  return CONCLAVE_OK;
}

const char* conclave_last_error_message() noexcept { return last_error.text(); }

const char* conclave_status_name(conclave_status status) noexcept {
  if (status == CONCLAVE_OK) return "CONCLAVE_OK";
  for (const conclave::capi::StatusRow& row : conclave::capi::kStatusRows) {
    if (row.status == status) return row.name;
  }
  return "unknown";
}
