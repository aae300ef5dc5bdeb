// The tensors in which compressed-tensors stores a matrix.
#pragma once

#include "checkpoint/methods/method.h"

#include <cstdint>
#include <span>

namespace conclave::inline v0::checkpoint {

struct CompressedStorage {
  enum class Kind : uint8_t {
    kBytes,  // "X.weight", a code each
    kWords,  // "X.weight_packed", int32
    kPairs,  // "X.weight_packed", two codes a byte, the first in its lower half
  };
  Kind kind = Kind::kBytes;
  int64_t bits = 0;
  bool scales_in_bytes = false;  // powers of two by their exponent
};
std::span<const StoredPlane> compressed_planes(const CompressedStorage& storage,
                                               const QuantSpec& spec);

}  // namespace conclave::inline v0::checkpoint
