// C interface, its base: versions, the rules of structs and texts, and how a call says what went
// wrong. docs/c-interface.md describes the interface as a whole; conclave/c.h includes all of it.
//
// These rules hold for every function below conclave/c. All but a few that cannot fail return a
// conclave_status, CONCLAVE_OK or an error, and no C++ exception ever leaves one. Where a call
// fails, nothing was made or written but what its own comment says, and results keep the values
// that they had. A pointer that must not be NULL is CONCLAVE_ERROR_NULL_POINTER where it is.
// Functions that a caller gives end by returning: a jump out of one is undefined, an exception of
// C++ ends the call with CONCLAVE_ERROR_INTERNAL, but from those that free, which must not throw.
// Texts end with a zero byte and are UTF-8, but for paths, which are bytes as the system has them.
// Arguments that a caller passes are its own and are read during the call alone, unless the comment
// says more. Objects that a call makes are the caller's, who ends each by the function of its type;
// NULL is then nothing to do. Objects hold what they need of each other, so that they may be
// ended in any order, but not while another thread uses them. Unless a comment says more, an
// object may be used by several threads where nothing of it changes.
#pragma once

#include "conclave/c/status.h"

#include <stddef.h>
#include <stdint.h>

// The interface that this header describes. It grows by one with every release that adds to it;
// nothing is ever taken away or changed, so that a program works with every library of the same or
// a larger number.
#define CONCLAVE_C_INTERFACE 1
#define CONCLAVE_C_VERSION "0.2.0"

// The build of a program against a static library defines CONCLAVE_STATIC, as the installed
// packages do by themselves.
#if defined(CONCLAVE_STATIC)
#define CONCLAVE_C_API
#else
#define CONCLAVE_C_API __attribute__((visibility("default")))
#endif
#if defined(__cplusplus)
#define CONCLAVE_C_NOTHROW noexcept
#else
#define CONCLAVE_C_NOTHROW
#endif

#if defined(__cplusplus)
extern "C" {
#endif

// Structs begin with struct_size, which the caller sets to sizeof of the struct; all other members
// may be zero, which means "not given" or the default that is stated. New members are only added
// at the end. A library takes the smaller struct of an older program, and takes new members for
// zero; of a newer program it takes a larger struct if the part that it does not know is zero,
// and is CONCLAVE_ERROR_UNSUPPORTED otherwise. Any other size is CONCLAVE_ERROR_INVALID_ARGUMENT.
// Structs that a call fills are filled up to struct_size, beyond the known part with zeros.

// CONCLAVE_C_INTERFACE of the library that runs.
CONCLAVE_C_API int32_t conclave_interface(void) CONCLAVE_C_NOTHROW;
// The version of the library that runs: "0.2.0". Lives as long as the process.
CONCLAVE_C_API const char* conclave_version(void) CONCLAVE_C_NOTHROW;

// The library that runs says what it was built from. Texts live as long as the process.
typedef struct conclave_build {
  size_t struct_size;
  const char* version;     // "0.2.0"
  const char* commit;      // short git hash, "unknown" outside a git checkout
  const char* compiler;    // "GNU 12.2.0"
  const char* build_type;  // "Release"
  const char* features;    // comma-separated: "cpu,avx2,avx512,avx512_bf16,amx,mpi"
} conclave_build;
CONCLAVE_C_API conclave_status conclave_get_build(conclave_build* build) CONCLAVE_C_NOTHROW;

// The last call of this thread that failed. Fields that do not apply are "", and `peer` is -1.
// Texts live until the next call of this thread that fails, or the thread ends.
typedef struct conclave_error {
  size_t struct_size;
  conclave_status status;  // CONCLAVE_OK if none has failed yet
  int32_t peer;            // the rank to blame for an error of communication
  const char* message;     // all of what follows on one line
  const char* what;        // the sentence that says what was wrong
  const char* file;
  const char* tensor;  // tensor, argument or field
  const char* expected;
  const char* found;
  const char* limit;
  const char* hint;   // the next step for the caller
  const char* phase;  // the step in which communication failed
} conclave_error;
// Calls that succeed leave the error as it is. This one changes it by no failure of its own.
CONCLAVE_C_API conclave_status conclave_last_error(conclave_error* error) CONCLAVE_C_NOTHROW;
// conclave_error::message; never NULL.
CONCLAVE_C_API const char* conclave_last_error_message(void) CONCLAVE_C_NOTHROW;
// "CONCLAVE_ERROR_SHAPE" for that status, and "unknown" for a number that is none. Lives as long
// as the process.
CONCLAVE_C_API const char* conclave_status_name(conclave_status status) CONCLAVE_C_NOTHROW;

// Frees a text that a call has made, one that is handed out as a `char**`.
CONCLAVE_C_API void conclave_text_free(char* text) CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif
