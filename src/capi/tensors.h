// Tensors of callers as views.
#pragma once

#include "capi/structs.h"

#include "conclave/c/tensor.h"
#include "conclave/tensor.h"

#include <cstddef>

namespace conclave::inline v0::capi {

template <>
inline constexpr size_t kLeastSize<conclave_tensor> = offsetof(conclave_tensor, row_stride);

// NULL is an empty view. Throws Error naming the tensor: kInvalidArgument, kDType, kShape, kStride,
// kSizeOverflow, kNullPointer where it has elements and no memory.
TensorView view_of(const conclave_tensor* tensor, const char* name);
// The same for one that is needed: Error(kNullPointer).
TensorView needed_view(const conclave_tensor* tensor, const char* name);

}  // namespace conclave::inline v0::capi
