// The gate product of a router: logits = x W^T, float32 accumulation, then rounding.
#pragma once

#include "core/flow.h"
#include "cpu/isa.h"

#include "conclave/context.h"
#include "conclave/tensor.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace conclave::inline v0::gemm {

// A small dense product [T, K] x [N, K]^T on packed weights of any of f32, f16, bf16.
// Always float32 FMA in ascending k whatever the experts' arithmetic, so that routing is the same
// under each. Immutable; safe to call from several threads.
class DenseProduct {
 public:
  virtual ~DenseProduct() = default;
  virtual int64_t row_bytes() const = 0;  // of the float32 RowBundle it reads
  // out [T, N] dense, rounded to `round_to` (kF32: not) and stored as float32.
  virtual void run(const RowBundle& rows, float* out, DType round_to, Executor& executor) const = 0;
};

// `weights` [N, K] dense; packed into memory of `allocator`.
std::unique_ptr<DenseProduct> make_dense_product(const ConstTensorView& weights, cpu::Isa isa,
                                                 HostAllocator& allocator);

}  // namespace conclave::inline v0::gemm
