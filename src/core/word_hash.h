// FNV-1a over 64-bit words: ranks compare it of what is too long to be told.
#pragma once

#include <concepts>
#include <cstdint>

namespace conclave::inline v0 {

class WordHash {
 public:
  void add(std::integral auto word) {
    hash_ = (hash_ ^ static_cast<uint64_t>(word)) * 0x100000001B3;
  }
  uint64_t value() const { return hash_; }
  // A number that may be negated and added to others.
  int64_t key() const { return static_cast<int64_t>(hash_ >> 2U); }

 private:
  uint64_t hash_ = 0xCBF29CE484222325;
};

}  // namespace conclave::inline v0
