// Checks the promise of every parser for any input: an Error of ours, with a message that is fit to
// show.
#pragma once

#include "io/text.h"

#include "conclave/error.h"

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <source_location>
#include <string_view>

namespace conclave::testing {

// Names the broken promise before the process ends, since a stack of inlined calls does not.
inline void promise(bool condition, std::source_location where = std::source_location::current()) {
  if (condition) return;
  std::fprintf(stderr, "broken promise: %s:%u\n", where.file_name(), unsigned{where.line()});
  std::abort();
}

// Runs `body` and returns the code of its Error, if any. An exception other than Error, or a
// malformed Error, ends the process.
template <class Body>
std::optional<ErrorCode> expect_value_or_error(Body body) {
  constexpr size_t kMaxMessageBytes = 16'384;
  try {
    body();
    return std::nullopt;
  } catch (const Error& error) {
    const std::string_view message = error.what();
    promise(to_string(error.code()) != "unknown");
    promise(error.code() != ErrorCode::kInternal);
    promise(!error.detail().what.empty());
    promise(message.size() <= kMaxMessageBytes);
    promise(!io::find_invalid_utf8(message));
    for (const char c : message) promise(static_cast<unsigned char>(c) >= 0x20);
    return error.code();
  }
}

}  // namespace conclave::testing
