// Types that the host and the kernels of tile.cuh share.
#pragma once

#include "activation/device/device_activation.h"
#include "core/device_flow.h"
#include "experts/cuda/common/vocabulary.h"

#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>
#include <cuda.h>
#include <span>

namespace conclave::inline v0::experts::tile {

struct Shape {
  int tokens;
  int features;
  int stages;
  int cluster;  // blocks per cluster; 2: two neighbouring token tiles share the loads of weights
  bool gathers = false;  // an up product that reads rows in token order
};

// Activations that a kernel can compute; each one adds code to every epilogue.
enum class Formulas : uint8_t { kCommon, kAll };

struct Params {
  CUtensorMap weights;   // boxes of kFeatures / kCluster rows
  CUtensorMap rows;      // sorted rows: boxes of 64
  const void* input;     // token rows, for kernels that gather
  int64_t input_stride;  // elements
  const float* input_weights;
  const TokenTile* tiles;
  const int32_t* num_tiles;
  const int32_t* expert_begin;
  void* queue;  // 16 bytes, aligned to 16; may hold anything before the first use
  const int32_t* row_slot;
  int32_t top_k;
  int32_t depth;          // K
  int32_t columns;        // result columns: I or H
  int32_t feature_tiles;  // tiles that cover the weight rows
  int32_t group;          // token tiles (pairs with clusters) of an expert that are walked together
  const float* bias;      // [E, columns], gated [E, 2 columns]; or null
  void* output;
  int64_t output_stride;     // elements
  bool whole_chunks;         // rows of `output` are 16-byte aligned
  const float* sum_weights;  // kDownSums: per slot, or null
  activation::DeviceActivation activation;
};

// A kernel that was built.
struct Kernel {
  Product product;
  Formulas formulas;
  Shape shape;
  void (*function)(Params);
  size_t shared_bytes;
  int32_t threads;
  int32_t box_features;
};
std::span<const Kernel> kernels_bf16();
std::span<const Kernel> kernels_f16();

}  // namespace conclave::inline v0::experts::tile
