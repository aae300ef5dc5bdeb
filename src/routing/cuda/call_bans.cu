#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "routing/cuda/call_bans.h"

#include <algorithm>
#include <cstdint>

namespace conclave::inline v0::routing {
namespace {

constexpr int32_t kThreads = 256;
// One block ranks all experts.
constexpr int32_t kRankThreads = 1024;
// As in routing/expert_budget.cc.
constexpr int32_t kLowBits = 31;
constexpr uint64_t kLowMask = (uint64_t{1} << kLowBits) - 1;
constexpr double kUnits = 0x1p40;
constexpr double kLargest = 0x1p20;

// Flags travel as parameters: the caller's memory may change once the call has returned.
constexpr int32_t kFlagsOfLaunch = 8192;
struct FlagBits {
  uint32_t words[kFlagsOfLaunch / 32] = {};
};

// `first`: of the flags that `bits` holds; the launch for the first ones also clears the sums.
__global__ void __launch_bounds__(kThreads)
    begin_kernel(const __grid_constant__ DeviceCallBans bans, const __grid_constant__ FlagBits bits,
                 int32_t first) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const auto at = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (first == 0 && at < 3 * bans.num_experts) bans.sums[at] = 0;
  if (at >= kFlagsOfLaunch || first + at >= bans.num_columns) return;
  bans.left_out[first + at] = static_cast<uint8_t>((bits.words[at / 32] >> (at % 32)) & 1U);
}

__device__ int64_t in_units(float weight) {
  if (!isfinite(weight)) return 0;
  const double bounded = fmin(fmax(static_cast<double>(weight), -kLargest), kLargest);
  return __double2ll_rn(bounded * kUnits);
}

__device__ void add(uint64_t* word, uint64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
}

__global__ void __launch_bounds__(kThreads)
    add_kernel(const __grid_constant__ DeviceCallBans bans,
               const __grid_constant__ DeviceBudgetRows rows) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t count = rows.num_tokens * rows.slots;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < count; at += step) {
    const int64_t token = at / rows.slots;
    if (rows.live_tokens != nullptr && token >= *rows.live_tokens) return;
    if (rows.padding_mask != nullptr && !rows.padding_mask[token]) continue;
    const int32_t id = rows.ids[at];
    if (id < 0 || id >= bans.num_experts) continue;
    const int64_t units = in_units(rows.weights[at]);
    add(bans.sums + id, static_cast<uint64_t>(units >> kLowBits));
    add(bans.sums + bans.num_experts + id, static_cast<uint64_t>(units) & kLowMask);
    add(bans.sums + 2 * bans.num_experts + id, 1);
  }
}

// A sum of weights; an expert that nobody has chosen is below every other.
struct Sum {
  int64_t high;
  uint64_t low;
  __device__ bool is_above(const Sum& other) const {
    return high > other.high || (high == other.high && low > other.low);
  }
  __device__ bool is_used() const { return high != kUnused; }
  static constexpr int64_t kUnused = INT64_MIN;
};

__device__ Sum sum_of(const DeviceCallBans& bans, int32_t expert) {
  const bool is_there = expert < bans.num_experts;
  if (!is_there || bans.sums[2 * bans.num_experts + expert] == 0) return {Sum::kUnused, 0};
  const uint64_t low = bans.sums[bans.num_experts + expert];
  return {static_cast<int64_t>(bans.sums[expert] + (low >> kLowBits)), low & kLowMask};
}

// By the whole block, each thread for an expert of its own: how many of the others are better.
__device__ int64_t count_better(const DeviceCallBans& bans, int32_t expert, const Sum& own) {
  __shared__ Sum tile[kRankThreads];
  int64_t better = 0;
  for (int32_t first = 0; first < bans.num_experts; first += kRankThreads) {
    __syncthreads();
    tile[threadIdx.x] = sum_of(bans, first + static_cast<int32_t>(threadIdx.x));
    __syncthreads();
    // Threads without an expert leave the multiprocessor to the others.
    const int32_t count = own.is_used() ? min(kRankThreads, bans.num_experts - first) : 0;
    for (int32_t i = 0; i < count; ++i) {
      const bool is_equal = !own.is_above(tile[i]) && !tile[i].is_above(own);
      better += tile[i].is_above(own) || (is_equal && first + i < expert) ? 1 : 0;
    }
  }
  return better;
}

__global__ void __launch_bounds__(kRankThreads)
    rank_kernel(const __grid_constant__ DeviceCallBans bans, int64_t budget) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  int64_t used = 0;
  for (int32_t first = 0; first < bans.num_experts; first += kRankThreads) {
    const int32_t expert = first + static_cast<int32_t>(threadIdx.x);
    used += __syncthreads_count(sum_of(bans, expert).is_used() ? 1 : 0);
  }
  if (used <= budget) return;
  for (int32_t first = 0; first < bans.num_experts; first += kRankThreads) {
    const int32_t expert = first + static_cast<int32_t>(threadIdx.x);
    const Sum own = sum_of(bans, expert);
    const int64_t better = count_better(bans, expert, own);
    const bool stays = own.is_used() && better < budget;
    if (expert < bans.num_experts && !stays) bans.left_out[expert] = 1;
  }
}

FlagBits bits_of(const uint8_t* flags, int64_t count) {
  FlagBits bits;
  for (int64_t i = 0; flags != nullptr && i < count; ++i) {
    if (flags[i] != 0) bits.words[i / 32] |= 1U << (i % 32);
  }
  return bits;
}

}  // namespace

size_t DeviceCallBans::bytes(int64_t num_experts, int64_t num_columns) {
  return static_cast<size_t>(3 * num_experts) * sizeof(uint64_t) + static_cast<size_t>(num_columns);
}

DeviceCallBans DeviceCallBans::in(void* memory, int64_t num_experts, int64_t num_columns) {
  auto* const sums = static_cast<uint64_t*>(memory);
  return {.sums = sums,
          .left_out = reinterpret_cast<uint8_t*>(sums + 3 * num_experts),
          .num_experts = static_cast<int32_t>(num_experts),
          .num_columns = static_cast<int32_t>(num_columns)};
}

void begin_call_bans(const DeviceCallBans& bans, const uint8_t* host_flags, CUstream_st* stream) {
  for (int32_t first = 0; first < bans.num_columns; first += kFlagsOfLaunch) {
    const int32_t flags = std::min(bans.num_columns - first, kFlagsOfLaunch);
    const int32_t items = first == 0 ? std::max(flags, 3 * bans.num_experts) : flags;
    cuda::launch("routing.begin_bans", begin_kernel,
                 {.blocks = ceil_div(items, kThreads), .threads = kThreads, .stream = stream}, bans,
                 bits_of(host_flags != nullptr ? host_flags + first : nullptr, flags), first);
  }
}

void add_expert_weights(const DeviceCallBans& bans, const DeviceBudgetRows& rows,
                        CUstream_st* stream) {
  constexpr int64_t kMaxBlocks = 4096;
  const int64_t slots = rows.num_tokens * rows.slots;
  if (slots == 0) return;
  cuda::launch("routing.add_weights", add_kernel,
               {.blocks = std::min(kMaxBlocks, ceil_div(slots, int64_t{kThreads})),
                .threads = kThreads,
                .stream = stream},
               bans, rows);
}

void ban_beyond_budget(const DeviceCallBans& bans, int64_t budget, CUstream_st* stream) {
  cuda::launch("routing.rank_experts", rank_kernel,
               {.blocks = 1, .threads = kRankThreads, .stream = stream}, bans, budget);
}

}  // namespace conclave::inline v0::routing
