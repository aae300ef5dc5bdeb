// Recognises, by content, formats that look like model files and must not be read as such: some can
// run code, others need converting.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0::io {

inline constexpr size_t kSniffBytes = 512;

// Throws Error(kForbiddenFormat), saying what the file is and what to do, if `start` (the first
// kSniffBytes of the file, or all of it) is pickle, zip, tar, gzip, HDF5, numpy, GGUF, a program, a
// Git LFS pointer or HTML.
void refuse_foreign_format(std::span<const std::byte> start, const std::string& file);

}  // namespace conclave::inline v0::io
