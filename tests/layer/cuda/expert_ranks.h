// Layers whose experts lie on two GPUs, with rows of each rank's own.
#pragma once

#include "comm/nccl/nccl_ranks.h"
#include "device_layer.h"

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {

// The tokens that each rank brings.
using TokensOfRanks = std::array<int64_t, kNcclRanks>;

inline std::unique_ptr<DeviceLayer> experts_of_rank(const MoeSpec& spec, int32_t rank,
                                                    Communicator& comm,
                                                    LayerOptions options = {.max_tokens = 128},
                                                    ParallelSpec parallel = {}) {
  parallel.ep_size = kNcclRanks;
  parallel.ep_rank = rank;
  return std::make_unique<DeviceLayer>(
      ContextOptions{.device = "cuda:" + std::to_string(device_of(rank)),
                     .num_threads = 2,
                     .communicator = &comm},
      spec, make_synthetic_source(spec, 11), options, parallel);
}

// Ten experts of odd width, of which a rank has half.
inline constexpr int64_t kExpertRanksHidden = 264;
inline MoeSpec expert_ranks_spec(DType dtype = DType::kBF16, const QuantSpec& quant = {},
                                 int64_t hidden = kExpertRanksHidden) {
  MoeSpec spec = make_spec(10, 3, hidden, 256, dtype);
  spec.quant = quant;
  return spec;
}

// The rows and choices of a rank, which are another rank's for another seed.
struct RankCall {
  Tensor hidden;
  GivenRouting routing;
};
inline RankCall call_of(const MoeSpec& spec, int32_t rank, int64_t tokens, DType dtype,
                        uint64_t seed = 5) {
  const uint64_t own = seed + 100 * static_cast<uint64_t>(rank);
  return {random_tensor(dtype, tokens, spec.hidden_size, own),
          random_routing(tokens, spec.num_experts, spec.top_k, own)};
}

// With rank_tokens, nobody asks. Memory of a device must not be freed while a kernel of NCCL waits
// there: ranks that are threads of one process would wait for each other.
inline Tensor run_call(DeviceLayer& owned, const RankCall& call, DType out,
                       std::optional<TokensOfRanks> tokens = {}) {
  DeviceForward forward(owned, call.hidden.view(), out);
  forward.route_by(call.routing.ids, call.routing.weights);
  if (tokens) forward.args.rank_tokens = *tokens;
  forward.enqueue();
  owned.queue.synchronize();
  return forward.out();
}

}  // namespace conclave::testing
