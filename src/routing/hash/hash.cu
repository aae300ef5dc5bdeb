#include "routing/cuda/route.h"
#include "routing/cuda/rows.cuh"
#include "routing/hash/hash.h"

#include <cstdint>
#include <memory>

namespace conclave::inline v0::routing {
namespace {

using device::kFullWarp;
using device::lane_id;

__global__ void __launch_bounds__(device::kRowThreads)
    look_up_kernel(const __grid_constant__ DeviceRouterArgs args, int32_t top_k, int64_t vocab) {
  const auto* table = static_cast<const int32_t*>(args.tensors[0]);
  const int32_t columns = args.table_columns != 0 ? args.table_columns : top_k;
  device::for_each_token(args.num_tokens, [&](int64_t token) {
    const bool used = device::counts(args, token);
    const int64_t row = used ? device::load_index(args.token_ids, args.token_ids_dtype, token) : -1;
    const bool valid = row >= 0 && row < vocab;
    if (used && !valid && lane_id() == 0) device::add_one(args.skipped_ids);
    for (int32_t slot = lane_id(); slot < top_k; slot += 32) {
      args.ids[token * top_k + slot] = valid ? table[row * columns + slot] : -1;
    }
  });
}

class HashOnDevice final : public DeviceRouter {
 public:
  explicit HashOnDevice(const MoeSpec& spec)
      : finish_(plan_device_route(spec)),
        top_k_(static_cast<int32_t>(spec.top_k)),
        vocab_(spec.router.vocab_size) {}

  const DeviceRoutePlan* finish() const override { return &finish_; }

  const int32_t* route(const DeviceRouterArgs& args, CUstream_st* stream) const override {
    if (args.given_ids != nullptr) return args.given_ids;
    if (args.num_tokens == 0) return args.ids;
    cuda::launch("routing.look_up", look_up_kernel, device::warps_of(args.num_tokens, stream), args,
                 top_k_, vocab_);
    return args.ids;
  }

 private:
  DeviceRoutePlan finish_;
  int32_t top_k_;
  int64_t vocab_;
};

Support supports_hash(const MoeSpec& spec) {
  if (Support support = hash_supports(spec); !support) return support;
  return device_route_supports(spec);
}

std::unique_ptr<DeviceRouter> make_hash(const MoeSpec& spec) {
  return std::make_unique<HashOnDevice>(spec);
}

}  // namespace

const DeviceRouterRow kHashOnDevice{.supports = supports_hash, .make = make_hash};

}  // namespace conclave::inline v0::routing
