// Host code shared by the kernels that stream weights.
#pragma once

#include "core/checked.h"
#include "cuda/launch.h"
#include "experts/cuda/device_experts.h"
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/sm90/stream/config.cuh"
#include "experts/cuda/sm90/stream/counters.h"
#include "experts/cuda/sm90/tensor_maps.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace conclave::inline v0::experts::stream {

// A kernel whose types are erased, but for its parameters'.
template <class Parameters>
struct KernelOf {
  void (*function)(const Parameters) = nullptr;
  size_t shared_bytes = 0;
  int32_t threads = 0;
  int32_t weight_rows = 0;
  int32_t depth = 0;  // elements of K per stage
  int32_t token_box = 0;
};

template <class Parameters>
struct KernelPairOf {
  KernelOf<Parameters> up;
  KernelOf<Parameters> down;
};

using Kernel = KernelOf<Params>;
using KernelPair = KernelPairOf<Params>;

template <class Config, class Parameters>
KernelOf<Parameters> describe_kernel(void (*function)(const Parameters)) {
  constexpr size_t kBytes = sizeof(SharedStorage<Config>);
  static_assert(kBytes <= kMostSharedBytes, "a block has at most 227 KiB of shared memory");
  return {.function = function,
          .shared_bytes = kBytes,
          .threads = Config::kThreads,
          .weight_rows = Config::kWeightRows,
          .depth = Config::kDepth,
          .token_box = Config::kTokenBox};
}

inline int32_t divide_up(int64_t a, int64_t b) { return static_cast<int32_t>(ceil_div(a, b)); }

template <class Parameters>
void allow_shared_bytes(const KernelOf<Parameters>& kernel) {
  cuda::allow_shared_bytes(reinterpret_cast<const void*>(kernel.function), kernel.shared_bytes);
}
template <class Parameters>
void allow_shared_bytes(const KernelPairOf<Parameters>& kernels) {
  allow_shared_bytes(kernels.up);
  allow_shared_bytes(kernels.down);
}

// A stage has as many columns of codes of 2 bits as of 4.
inline uint32_t code_box_bytes(const ExpertsProblem& problem) {
  return code_order(problem) == CodeOrder::kLanesOfSmallNumbers ? kHalfBoxBytes : kBoxBytes;
}

// Parameters of a product that are known before a call; the caller adds scales and the stride of
// the intermediate.
template <class Parameters>
Parameters up_params(const ExpertsProblem& problem, const DeviceExperts& weights,
                     const KernelOf<Parameters>& kernel) {
  const bool gated = problem.activation.gated;
  const int64_t width = problem.intermediate_size;
  const int32_t rows = kernel.weight_rows;
  const uint32_t box = code_box_bytes(problem);
  Parameters params;
  params.weights = gated ? map_gated_weights(problem, weights, rows, box)
                         : map_weights(problem,
                                       {weights.gate_up.data, weights.gate_up.stride, width,
                                        problem.input_columns()},
                                       rows, box);
  params.bias = weights.gate_up.bias;
  params.features = static_cast<int32_t>(width);
  params.feature_tiles = divide_up(gated ? 2 * width : width, rows);
  params.depth = static_cast<int32_t>(problem.input_columns());
  params.depth_stages = divide_up(problem.input_columns(), kernel.depth);
  params.activation = activation::device_activation(problem.activation);
  return params;
}

template <class Parameters>
Parameters down_params(const ExpertsProblem& problem, const DeviceExperts& weights,
                       const KernelOf<Parameters>& kernel) {
  const int64_t width = problem.hidden_size;
  const int64_t depth = problem.intermediate_size;
  Parameters params;
  params.weights = map_weights(problem, {weights.down.data, weights.down.stride, width, depth},
                               kernel.weight_rows, code_box_bytes(problem));
  params.bias = weights.down.bias;
  params.features = static_cast<int32_t>(width);
  params.feature_tiles = divide_up(width, kernel.weight_rows);
  params.depth = static_cast<int32_t>(depth);
  params.depth_stages = divide_up(depth, kernel.depth);
  return params;
}

template <class Parameters>
Parameters with_groups(Parameters params, const GroupedRows& groups) {
  params.tiles = groups.tiles;
  params.num_tiles = groups.num_tiles;
  params.expert_begin = groups.expert_begin;
  params.tile_tokens = groups.tile_tokens;
  params.row_slot = groups.row_slot;
  params.top_k = groups.top_k;
  return params;
}

template <class Parameters>
void set_counters(Parameters& params, void* workspace) {
  auto* const base = static_cast<std::byte*>(workspace);
  params.hand_over = reinterpret_cast<HandOver*>(base);
  params.tickets = base + kTicketsAt;
}

// The intermediate rows of kernels that have nothing else in a workspace.
inline void* rows_behind_counters(void* workspace) {
  return static_cast<std::byte*>(workspace) + kCounterBytes;
}

// True if 16-byte stores may write these rows of 16-bit elements.
inline bool has_wide_rows(const void* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
}

inline void set_output(Params& params, const DeviceExpertsCall& call) {
  params.output = call.output;
  params.output_stride = call.output_stride;
  params.wide_stores = has_wide_rows(call.output, call.output_stride);
}

template <class Parameters>
void enqueue(std::string_view name, const KernelOf<Parameters>& kernel, const Parameters& params,
             int64_t max_tiles, int32_t multiprocessors, CUstream_st* stream) {
  cuda::launch(name, kernel.function,
               {.blocks = std::min<int64_t>(max_tiles * params.feature_tiles, multiprocessors),
                .threads = kernel.threads,
                .shared_bytes = kernel.shared_bytes,
                .stream = stream},
               params);
}

}  // namespace conclave::inline v0::experts::stream
