// Codes of lanes in a stage of shared memory.
#pragma once

#include "experts/cuda/sm90/stream/config.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::stream {

// A thread's codes of 64 columns of two weight rows, the second eight below the first: a word has
// those of 32 columns.
template <class Config>
class LaneWords {
 public:
  // `row` is the first row, and `pair` says which columns of each eight are the thread's.
  __device__ __forceinline__ LaneWords(const SharedStorage<Config>& shared, int32_t slot,
                                       int32_t atom, int32_t row, int32_t pair) {
    const uint8_t* const codes = shared.weights[slot][0] + row * Config::kAtomBytes +
                                 ((2 * atom + pair / 2) ^ (row % 8)) * 16 + pair % 2 * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 both = *reinterpret_cast<const uint2*>(codes + i * 8 * Config::kAtomBytes);
      words_[i][0] = both.x;
      words_[i][1] = both.y;
    }
  }

  __device__ __forceinline__ uint32_t of(int row, int word) const { return words_[row][word]; }

 private:
  uint32_t words_[2][2];
};

// The place among fragments that weight i of a word's four pairs has, of the first or the second
// row.
struct FragmentPlace {
  int step;  // each has 16 columns
  int element;
};
constexpr __device__ FragmentPlace fragment_of(int word, int row, int i) {
  return {.step = 2 * word + i / 2, .element = i % 2 * 2 + row};
}

}  // namespace conclave::inline v0::experts::stream
