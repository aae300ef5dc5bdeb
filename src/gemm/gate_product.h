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

// A product's matrix [columns, k] as panels hold it: the same bytes on every CPU.
struct PackedMatrix {
  int64_t columns = 0;
  int64_t k = 0;
  DType dtype = DType::kF32;
  std::span<const std::byte> panels = {};
};

// A small dense product [T, K] x [N, K]^T on packed weights of any of f32, f16, bf16.
// It always uses float32 FMA in ascending k, whatever the experts' arithmetic, so that routing is
// the same for all. Immutable; safe to call from several threads.
class DenseProduct {
 public:
  virtual ~DenseProduct() = default;
  virtual int64_t row_bytes() const = 0;  // stride of the float32 rows that it reads
  // Writes `out` [T, N], dense, rounded to `round_to` (not at all for kF32) and stored as float32.
  virtual void run(const RowBundle& rows, float* out, DType round_to, Executor& executor) const = 0;
  // The same weights in memory of another allocator.
  virtual std::unique_ptr<DenseProduct> copy(HostAllocator& allocator) const = 0;
  virtual PackedMatrix packed() const = 0;  // valid as long as the product
};

// Packs `weights` [N, K], whose rows may be strided, into memory of `allocator`. Throws
// Error(kDType) unless they are float, Error(kShape) unless they are a matrix.
std::unique_ptr<DenseProduct> make_dense_product(const ConstTensorView& weights, cpu::Isa isa,
                                                 HostAllocator& allocator);

// The product of a matrix that is packed already, copied. Throws Error(kDType) likewise and
// Error(kShape) for another number of bytes.
std::unique_ptr<DenseProduct> make_packed_product(const PackedMatrix& matrix, cpu::Isa isa,
                                                  HostAllocator& allocator);

}  // namespace conclave::inline v0::gemm
