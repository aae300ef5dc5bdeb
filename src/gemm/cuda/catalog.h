// The kernels of the gate product on the device, in the order in which more tokens want them.
#pragma once

#include "core/catalog.h"
#include "gemm/cuda/gate_product.h"

#include "conclave/error.h"

#include <cstdint>
#include <string_view>
#include <vector>

namespace conclave::inline v0::gemm {

struct DeviceGateProblem {
  int64_t num_logits = 0;
  int64_t max_tokens = 0;
  int64_t shared_bytes = kManyTokensSharedBytes;  // that a block of the device may have
};

struct DeviceGateRow {
  std::string_view name;  // "cuda.gate_few"
  GateKernel kernel = GateKernel::kFewTokens;
  Support (*supports)(const DeviceGateProblem& problem);
  // The fewest tokens from which it is faster than the rows before it.
  int64_t (*first_tokens)(const DeviceGateProblem& problem);
  std::string_view reason;  // why it is the fastest there
};
Catalog<DeviceGateRow> device_gate_catalog();

// The choice for calls of up to `last_tokens` tokens, above those of the rung before.
struct GateRung {
  int64_t last_tokens = 0;
  const DeviceGateRow* row = nullptr;
};
// Ascending, the last rung for max_tokens.
std::vector<GateRung> gate_ladder(const DeviceGateProblem& problem);

}  // namespace conclave::inline v0::gemm
