// The gate product of a router on the device: logits = x W^T (+ bias), rounded.
#pragma once

#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::gemm {

// Types are kF32, kF16 or kBF16. Rows may be strided and need only the alignment of their elements;
// rows aligned to 16 bytes are faster.
struct DeviceGateArgs {
  const void* rows = nullptr;  // [T, rows_stride]
  DType rows_dtype = DType::kBF16;
  int64_t rows_stride = 0;
  int64_t num_tokens = 0;
  int64_t hidden_size = 0;
  const void* weights = nullptr;  // [N, weights_stride]
  DType weights_dtype = DType::kBF16;
  int64_t weights_stride = 0;
  int64_t num_logits = 0;            // N
  const float* bias = nullptr;       // [N], or null
  DType logits_dtype = DType::kF32;  // product plus bias are rounded to it
  // Weight of RouterInputNorm: [H], or null. With one, the gate reads x / sqrt(mean(x^2) + epsilon)
  // * weight * H^-0.5 from `workspace`.
  const float* norm_weight = nullptr;
  double norm_epsilon = 0;
  void* workspace = nullptr;  // device_gate_workspace_bytes, 16-byte aligned; null without a norm
  float* logits = nullptr;    // [T, N] dense out
};

// Bytes for at most max_tokens tokens; 0 without a norm.
size_t device_gate_workspace_bytes(int64_t max_tokens, int64_t hidden_size, bool has_norm);

// The kernels, among which gemm/cuda/catalog.h chooses; all give the same bits. kManyTokens needs
// rows at multiples of 16 bytes: others are left to kSomeTokens.
inline constexpr int64_t kManyTokensSharedBytes = int64_t{96} << 10;  // a block of kManyTokens
enum class GateKernel : uint8_t { kFewTokens, kSomeTokens, kManyTokens };

// Lets the kernel use the shared memory that it needs for rows of every type. Called on the current
// device before the first product there; does not depend on sizes.
void prepare_gate_product(GateKernel kernel, DType weights_dtype);
// One launch, two with a norm. Products are formed exactly and accumulated in float32 by the tensor
// cores, in one order for each token, whatever the other tokens are (D2): docs/numerics.md. A row
// with Inf may have NaN where the exact logit is infinite.
void device_gate_product(const DeviceGateArgs& args, GateKernel kernel, CUstream_st* stream);

}  // namespace conclave::inline v0::gemm
