// The group limit masks the keys of groups that are not kept, as routing/topk/choose.cc does.
#pragma once

#include "routing/cuda/route_rule.h"
#include "routing/cuda/score.cuh"

#include <cstdint>

namespace conclave::inline v0::routing::device {

struct BestTwo {
  double first;
  double second;

  __device__ __forceinline__ void add(double key) {
    const bool above = key > first;
    const double rest = key > second ? key : second;
    second = above ? first : rest;
    first = above ? key : first;
  }
};

// Shared memory of one warp: keys, those of a group together, then the groups' values, then their
// kept flags.
struct GroupScratch {
  double* keys;
  double* values;
  double* kept;  // 1 or 0

  __device__ __forceinline__ GroupScratch(const DeviceRouteRule& rule, double* memory)
      : keys(memory),
        values(memory + rule.choose.num_groups * rule.group_stride),
        kept(values + rule.choose.num_groups) {}
};

__device__ __forceinline__ int32_t group_of(const DeviceRouteRule& rule, int32_t column) {
  return static_cast<int32_t>((static_cast<uint32_t>(column) * rule.group_inverse) >> 20);
}

// Computes the value of each group: the largest of its keys, or the two largest summed.
__device__ __forceinline__ void value_groups(const DeviceRouteRule& rule,
                                             const GroupScratch& scratch) {
  const int32_t lanes = rule.lanes_a_group;
  const auto groups = static_cast<int32_t>(rule.choose.num_groups);
  const int32_t part = lane_id() & (lanes - 1);
  for (int32_t base = 0; base < groups; base += 32 / lanes) {
    const int32_t group = base + run_of_lanes(lanes);
    BestTwo best{absent(), absent()};
#pragma unroll 4
    for (int32_t i = part; i < rule.group_size && group < groups; i += lanes) {
      best.add(scratch.keys[group * rule.group_stride + i]);
    }
    for (int32_t step = 1; step < lanes; step *= 2) {
      const double first = __shfl_xor_sync(kFullWarp, best.first, step);
      const double second = __shfl_xor_sync(kFullWarp, best.second, step);
      best.add(first);
      best.add(second);
    }
    if (part != 0 || group >= groups) continue;
    const bool sums = rule.choose.group_score == GroupScore::kTop2Sum && present(best.second);
    scratch.values[group] = sums ? best.first + best.second : best.first;
  }
}

// A group is kept if fewer than topk_groups others come before it.
__device__ __forceinline__ void keep_groups(const DeviceRouteRule& rule,
                                            const GroupScratch& scratch) {
  const auto groups = static_cast<int32_t>(rule.choose.num_groups);
  for (int32_t group = lane_id(); group < groups; group += 32) {
    const double own = scratch.values[group];
    int32_t before = 0;
#pragma unroll 4
    for (int32_t other = 0; other < groups; ++other) {
      const double value = scratch.values[other];
      before += value > own || (value == own && other < group) ? 1 : 0;
    }
    scratch.kept[group] = before < rule.choose.topk_groups ? 1.0 : 0.0;
  }
}

template <int kColumns>
__device__ __forceinline__ void mask_groups(const DeviceRouteRule& rule, double* memory,
                                            double (&keys)[kColumns]) {
  const GroupScratch scratch(rule, memory);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int32_t column = column_of<kColumns>(i);
    if (column < rule.num_columns) {
      const int32_t group = group_of(rule, column);
      scratch.keys[column + group * (rule.group_stride - rule.group_size)] = keys[i];
    }
  }
  __syncwarp();
  value_groups(rule, scratch);
  __syncwarp();
  keep_groups(rule, scratch);
  __syncwarp();
  const double masked = rule.choose.group_mask == GroupMask::kZero ? 0.0 : absent();
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int32_t column = column_of<kColumns>(i);
    if (column >= rule.num_columns || !present(keys[i])) continue;
    if (scratch.kept[group_of(rule, column)] == 0.0) keys[i] = masked;
  }
  __syncwarp();
}

}  // namespace conclave::inline v0::routing::device
