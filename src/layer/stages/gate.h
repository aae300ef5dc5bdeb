// The layer's own gate product, and logits that a call brings.
#pragma once

#include "core/flow.h"
#include "gemm/gate_product.h"
#include "layer/router_vectors.h"

#include "conclave/context.h"
#include "conclave/spec.h"
#include "conclave/tensor.h"

#include <cstdint>

namespace conclave::inline v0 {

struct Gate {
  const gemm::DenseProduct& product;
  const RouterSpec& router;
  const RouterVectors& vectors;
};

// `rows`, float32, normalised by the router's input norm, at `to`, in rows of `row_bytes`, zero
// padded. They may lie at `to` themselves, in rows of as many bytes.
RowBundle norm_gate_rows(const Gate& gate, const RowBundle& rows, int64_t row_bytes, std::byte* to,
                         Executor& executor);

// Writes `logits` [T, num_logits]: the product of float32 rows, to which a bias is added before it
// is rounded to RouterSpec::logits_dtype.
void run_gate(const Gate& gate, const RowBundle& rows, float* logits, Executor& executor);

// The caller's logits as dense float32: in place if they are that already, otherwise at `to`.
const float* dense_logits(const ConstTensorView& given, float* to);

}  // namespace conclave::inline v0
