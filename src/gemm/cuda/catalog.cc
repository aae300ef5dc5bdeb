#include "gemm/cuda/catalog.h"

#include "core/checked.h"

#include <algorithm>
#include <array>
#include <string>

namespace conclave::inline v0::gemm {
namespace {

// Measured on an H200: logits in a call (tokens times columns) up to which one warp for each
// segment of a small tile is the fastest, and from which rows that all warps share are.
constexpr int64_t kFewProducts = 32'768;
constexpr int64_t kManyProducts = 1'000'000;
// Fewer columns leave most of a shared tile idle.
constexpr int64_t kLeastSharedColumns = 32;

Support every(const DeviceGateProblem& /*problem*/) { return Support::yes(); }

Support many_columns(const DeviceGateProblem& problem) {
  if (problem.shared_bytes < kManyTokensSharedBytes) {
    return Support::no("needs " + std::to_string(kManyTokensSharedBytes) +
                       " bytes of shared memory; a block has " +
                       std::to_string(problem.shared_bytes));
  }
  if (problem.num_logits >= kLeastSharedColumns) return Support::yes();
  return Support::no("takes " + std::to_string(kLeastSharedColumns) + " columns or more; found " +
                     std::to_string(problem.num_logits));
}

int64_t from_first(const DeviceGateProblem& /*problem*/) { return 1; }
int64_t beyond_few(const DeviceGateProblem& problem) {
  return kFewProducts / std::max<int64_t>(problem.num_logits, 1) + 1;
}
int64_t from_many(const DeviceGateProblem& problem) {
  return ceil_div(kManyProducts, std::max<int64_t>(problem.num_logits, 1));
}

constexpr std::array kRows = {
    DeviceGateRow{.name = "cuda.gate_few",
                  .kernel = GateKernel::kFewTokens,
                  .supports = every,
                  .first_tokens = from_first,
                  .reason = "small tiles, so that many warps read the weights at once"},
    DeviceGateRow{.name = "cuda.gate_some",
                  .kernel = GateKernel::kSomeTokens,
                  .supports = every,
                  .first_tokens = beyond_few,
                  .reason = "larger tiles, which read each row fewer times"},
    DeviceGateRow{.name = "cuda.gate_many",
                  .kernel = GateKernel::kManyTokens,
                  .supports = many_columns,
                  .first_tokens = from_many,
                  .reason = "rows through shared memory, if they lie at multiples of 16 bytes"},
};

}  // namespace

Catalog<DeviceGateRow> device_gate_catalog() { return Catalog<DeviceGateRow>(kRows); }

std::vector<GateRung> gate_ladder(const DeviceGateProblem& problem) {
  std::vector<GateRung> ladder;
  for (const DeviceGateRow& row : kRows) {
    if (!row.supports(problem)) continue;
    const int64_t first = row.first_tokens(problem);
    if (first > problem.max_tokens) continue;
    // With many columns a row may be the fastest from the first token on.
    if (first == 1) ladder.clear();
    if (!ladder.empty()) ladder.back().last_tokens = first - 1;
    ladder.push_back({.last_tokens = problem.max_tokens, .row = &row});
  }
  return ladder;
}

}  // namespace conclave::inline v0::gemm
