// Tensors of caller-owned weights as stacks of matrices.
#pragma once

#include "conclave/dtype.h"
#include "conclave/tensor.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <string>

namespace conclave::inline v0 {

// A tensor and its name for messages.
struct Named {
  std::string name;
  const ConstTensorView& tensor;
};

// A tensor of S matrices or vectors; it may leave out its first dimension if S is 1.
struct Stack {
  const std::byte* data = nullptr;
  DType dtype = DType::kF32;
  int64_t count = 0;
  int64_t rows = 0;
  int64_t cols = 0;
};

// The element `elements` behind `data`.
const std::byte* offset_by(const void* data, int64_t elements, DType dtype);

// Throws Error(kNullPointer, kShape, kDType, kMisaligned) unless the tensor is dense, of this rank
// and aligned.
void check_tensor(const Named& named, int rank);
// [S, rows, cols], or [S, cols] with rank 2; `may_be_one`: without S, if it is 1. Checks the
// tensor.
Stack stack_of(const Named& named, int rank, bool may_be_one);
// A plane that gives codes a meaning, of one matrix or of gate and up: their rows follow each
// other, or both have one. `may_be_one` as above, for planes in the shapes of scales.
Stack plane_stack(const Named& named, WeightPlane plane, bool may_be_one);

}  // namespace conclave::inline v0
