#include "capi/structs.h"

#include "conclave/error.h"

#include <string>

namespace conclave::inline v0::capi {

void check_size(const char* name, size_t size, size_t least, size_t known) {
  if (is_possible_size(size) && size >= least) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      {.what = "struct_size is not that of any version of this struct",
       .tensor = std::string(name) + ".struct_size",
       .expected = std::to_string(known) + ", or a multiple of " + std::to_string(kWord) +
                   " from " + std::to_string(least) + " to " + std::to_string(kLargestStruct),
       .found = std::to_string(size),
       .hint = "set it to sizeof of the struct"});
}

void check_tail(const char* name, const std::byte* tail, size_t bytes, size_t known) {
  const std::byte* const end = tail + bytes;
  const std::byte* const set =
      std::find_if(tail, end, [](std::byte value) { return value != std::byte{0}; });
  if (set == end) return;
  throw Error(ErrorCode::kUnsupported,
              {.what = "the program sets a member that this version of the library does not know",
               .tensor = name,
               .found = "a byte that is not zero at offset " +
                        std::to_string(known + static_cast<size_t>(set - tail)),
               .limit = std::to_string(known) + " bytes"});
}

void check_element_size(const char* name, size_t size, size_t of_first) {
  if (size == of_first) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "structs in a row are not of one size",
               .tensor = std::string(name) + ".struct_size",
               .expected = std::to_string(of_first) + ", as of the first",
               .found = std::to_string(size)});
}

void check_aligned(const char* name, const void* pointer, size_t alignment) {
  if (reinterpret_cast<uintptr_t>(pointer) % alignment == 0) return;
  throw Error(ErrorCode::kMisaligned, {.what = "an argument is not aligned to its element",
                                       .tensor = name,
                                       .expected = "a multiple of " + std::to_string(alignment)});
}

void check_count(const char* name, size_t count, size_t most) {
  if (count <= most) return;
  throw Error(ErrorCode::kInvalidArgument, {.what = "there cannot be so many elements",
                                            .tensor = name,
                                            .found = std::to_string(count),
                                            .limit = "0 to " + std::to_string(most)});
}

void throw_null(const char* name) {
  throw Error(ErrorCode::kNullPointer,
              {.what = "a pointer that is needed is NULL", .tensor = name});
}

void check_flags(const char* name, unsigned flags, unsigned known) {
  if ((flags & ~known) == 0) return;
  throw Error(ErrorCode::kInvalidArgument, {.what = "bits are set that mean nothing",
                                            .tensor = name,
                                            .expected = "bits of " + std::to_string(known),
                                            .found = std::to_string(flags)});
}

}  // namespace conclave::inline v0::capi
