// Helpers for the io tests: throw-away directories, hand-made safetensors files, error codes.
#pragma once

#include "support/sanitizers.h"

#include "conclave/error.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace conclave::testing {

// A temporary directory that is removed with all its content.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory();

  const std::filesystem::path& path() const { return path_; }
  // Writes a file, making its parent directories, and returns its path.
  std::filesystem::path write(const std::filesystem::path& name, std::string_view content) const;

 private:
  std::filesystem::path path_;
};

std::string read_file(const std::filesystem::path& path);

// Returns the eight length bytes.
std::string length_prefix(uint64_t bytes);
// Returns length, header, and `data_bytes` bytes of data that all differ from their neighbours.
std::string safetensors(std::string_view header, size_t data_bytes = 0);
// Returns one entry: "name":{"dtype":...,"shape":[...],"data_offsets":[...]}.
std::string entry(std::string_view name, std::string_view dtype, std::string_view shape,
                  std::string_view offsets);
// Returns a header of `count` tensors of four bytes, named as in a large checkpoint.
std::string large_header(size_t count);

inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

// Returns the code of the Error that `body` throws, if any. `what` gets the message.
std::optional<ErrorCode> code_of(const std::function<void()>& body, std::string* what = nullptr);

// Used by tests that run in every access mode.
inline constexpr FileAccess kAccessModes[] = {FileAccess::kAuto, FileAccess::kMap,
                                              FileAccess::kRead};
std::string access_name(const ::testing::TestParamInfo<FileAccess>& param);

// Returns the code's name for messages, or "no error".
std::string name_of(std::optional<ErrorCode> code);

// The resident set of the process and its peak since the last reset, in bytes; 0 if unknown.
size_t resident_bytes();
size_t peak_resident_bytes();
void reset_peak_resident();

// Sanitizers and unoptimised code are slow and use much memory: time and memory bars apply to the
// builds that users run; elsewhere the figures are only printed.
constexpr bool kIsInstrumented =
#if CONCLAVE_TEST_ASAN || CONCLAVE_TEST_TSAN || !defined(NDEBUG)
    true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
    true;
#else
    false;
#endif
#else
    false;
#endif

}  // namespace conclave::testing
