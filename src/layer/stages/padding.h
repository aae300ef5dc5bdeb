// Tells the tokens of a chunk from its padding.
#pragma once

#include "conclave/tensor.h"

#include <cstdint>

namespace conclave::inline v0 {

class Padding {
 public:
  // The chunk's part of a padding mask; an empty one calls every row a token.
  explicit Padding(const ConstTensorView& mask) : mask_(static_cast<const uint8_t*>(mask.data)) {}

  bool may_exist() const { return mask_ != nullptr; }
  bool is_token(int64_t row) const { return mask_ == nullptr || mask_[row] != 0; }
  // [T]: 0 for padding; null without a mask.
  const uint8_t* mask() const { return mask_; }

 private:
  const uint8_t* mask_;
};

}  // namespace conclave::inline v0
