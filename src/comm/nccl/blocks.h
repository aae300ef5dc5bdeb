// The blocks of a long sum, of which each rank adds up one and gives it to all.
#pragma once

#include "core/checked.h"

#include "conclave/version.h"

#include <algorithm>
#include <cstdint>

namespace conclave::inline v0::comm {

inline constexpr int64_t kBlockAlignment = 256;

struct Range {
  int64_t begin = 0;
  int64_t bytes = 0;
};
// That of `rank` of `bytes` bytes in all; the last ones are shorter or empty.
inline Range block_of(int64_t bytes, int32_t ranks, int32_t rank) {
  const int64_t block = round_up(ceil_div(bytes, int64_t{ranks}), kBlockAlignment);
  const int64_t begin = std::min(block * rank, bytes);
  return {.begin = begin, .bytes = std::min(begin + block, bytes) - begin};
}

}  // namespace conclave::inline v0::comm
