#include "layer/rank_agreement.h"

#include "conclave/error.h"

#include <array>
#include <string>
#include <vector>

namespace conclave::inline v0 {
namespace {

constexpr std::array kFieldNames = {"the library version", "num_experts",       "top_k",
                                    "hidden_size",         "intermediate_size", "weight_dtype",
                                    "max_tokens",          "arithmetic",        "transport",
                                    "ep_combine",          "placement",         "ep_size"};
using Fingerprint = std::array<int64_t, kFieldNames.size()>;

Fingerprint fingerprint(const LayerPlan& plan) {
  return {CONCLAVE_VERSION_MAJOR * 10000 + CONCLAVE_VERSION_MINOR * 100 + CONCLAVE_VERSION_PATCH,
          plan.spec.num_experts,
          plan.spec.top_k,
          plan.spec.hidden_size,
          plan.spec.intermediate_size,
          static_cast<int64_t>(plan.spec.weight_dtype),
          plan.options.max_tokens,
          static_cast<int64_t>(plan.arithmetic),
          static_cast<int64_t>(plan.options.transport),
          static_cast<int64_t>(plan.options.ep_combine),
          static_cast<int64_t>(plan.parallel.placement),
          plan.parallel.ep_size};
}

}  // namespace

void check_ranks_agree(const LayerPlan& plan, Communicator* communicator) {
  if (plan.parallel.ep_size == 1) return;
  const Fingerprint mine = fingerprint(plan);
  std::vector<Fingerprint> all(static_cast<size_t>(communicator->size()));
  communicator->all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)),
                           "create: agree on the plan");
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (size_t field = 0; field < mine.size(); ++field) {
      if (all[rank][field] == mine[field]) continue;
      throw CommError(ErrorCode::kCommMismatch, static_cast<int32_t>(rank),
                      "create: agree on the plan",
                      std::string("ranks differ in ") + kFieldNames[field] + ": " +
                          std::to_string(all[rank][field]) + " there, " +
                          std::to_string(mine[field]) + " here");
    }
  }
}

int64_t agree_on_chunks(int64_t chunks, const LayerPlan& plan, Communicator* communicator) {
  if (plan.parallel.ep_size == 1) return chunks;
  int64_t largest = 0;
  communicator->all_reduce(std::as_bytes(std::span(&chunks, 1)),
                           std::as_writable_bytes(std::span(&largest, 1)), DType::kI64,
                           ReduceOp::kMax, "forward: agree on the chunks");
  return largest;
}

}  // namespace conclave::inline v0
