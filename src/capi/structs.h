// How structs of callers are read and filled, whose programs may be older or newer than the
// library.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

namespace conclave::inline v0::capi {

// Sizes are whole words: no member lies across two of them, so that none is cut. More than the
// largest is no struct but memory that nobody has set.
inline constexpr size_t kWord = sizeof(size_t);
inline constexpr size_t kLargestStruct = 4096;

constexpr bool is_possible_size(size_t size) noexcept {
  return size >= kWord && size % kWord == 0 && size <= kLargestStruct;
}

// A caller of the first release already had to give this many bytes.
template <class Struct>
inline constexpr size_t kLeastSize = kWord;

// Throw Error(kInvalidArgument) naming the struct, and kUnsupported where `tail` is not zero.
void check_size(const char* name, size_t size, size_t least, size_t known);
void check_tail(const char* name, const std::byte* tail, size_t bytes, size_t known);
void check_element_size(const char* name, size_t size, size_t of_first);
[[noreturn]] void throw_null(const char* name);
// Throws Error(kMisaligned) naming the argument.
void check_aligned(const char* name, const void* pointer, size_t alignment);
// Throws Error(kInvalidArgument) for more elements than there can be.
void check_count(const char* name, size_t count, size_t most);
// Throws Error(kInvalidArgument) for bits that `known` lacks, and for a reserved member that is
// set.
void check_flags(const char* name, unsigned flags, unsigned known);

template <class T>
T& required(T* pointer, const char* name) {
  if (pointer == nullptr) throw_null(name);
  if constexpr (!std::is_function_v<T>) check_aligned(name, pointer, alignof(T));
  return *pointer;
}

// Elements of the caller, of which there are none behind a NULL.
template <class T>
std::span<const T> array_of(const T* data, size_t count, const char* name, const char* count_name,
                            size_t most) {
  check_count(count_name, count, most);
  if (count > 0) required(data, name);
  return {data, count};
}

// A copy of the struct, in which members that the caller does not know are zero.
template <class Struct>
Struct take(const Struct* given, const char* name) {
  static_assert(std::is_trivially_copyable_v<Struct> && sizeof(Struct) % kWord == 0);
  required(given, name);
  size_t size = 0;
  std::memcpy(&size, given, sizeof(size));
  check_size(name, size, kLeastSize<Struct>, sizeof(Struct));
  if (size > sizeof(Struct)) {
    check_tail(name, reinterpret_cast<const std::byte*>(given) + sizeof(Struct),
               size - sizeof(Struct), sizeof(Struct));
  }
  Struct known = {};
  std::memcpy(&known, given, std::min(size, sizeof(Struct)));
  return known;
}

// One of several structs in a row, which are of one size: that of the first. `place` names it.
template <class Struct>
Struct take_element(const Struct* first, size_t index, const char* name, const char* place) {
  required(first, name);
  size_t stride = 0;
  std::memcpy(&stride, first, sizeof(stride));
  check_size(place, stride, kLeastSize<Struct>, sizeof(Struct));
  const auto* const at =
      reinterpret_cast<const Struct*>(reinterpret_cast<const std::byte*>(first) + index * stride);
  size_t size = 0;
  std::memcpy(&size, at, sizeof(size));
  check_element_size(place, size, stride);
  return take(at, place);
}

// The same where NULL stands for a struct of zeros.
template <class Struct>
Struct take_optional(const Struct* given, const char* name) {
  return given == nullptr ? Struct{} : take(given, name);
}

// Fills as much as the caller knows, whose size has been checked.
template <class Struct>
void fill(Struct* to, Struct values) noexcept {
  static_assert(std::is_trivially_copyable_v<Struct> && sizeof(Struct) % kWord == 0);
  const size_t size = to->struct_size;
  values.struct_size = size;
  std::memcpy(to, &values, std::min(size, sizeof(Struct)));
  if (size <= sizeof(Struct)) return;
  std::memset(reinterpret_cast<std::byte*>(to) + sizeof(Struct), 0, size - sizeof(Struct));
}

// Checks the struct that a call is to fill before it begins.
template <class Struct>
Struct* fillable(Struct* to, const char* name) {
  required(to, name);
  size_t size = 0;
  std::memcpy(&size, to, sizeof(size));
  check_size(name, size, kWord, sizeof(Struct));
  return to;
}

}  // namespace conclave::inline v0::capi
