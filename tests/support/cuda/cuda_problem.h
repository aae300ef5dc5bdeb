// One layer's experts on the GPU with random weights, rows and routings, on which kernels are
// tested and timed. Needs a device.
#pragma once

#include "core/device_flow.h"
#include "cuda/device_info.h"
#include "cuda/memory.h"
#include "experts/cuda/device_experts.h"
#include "support/cuda/device_oracle.h"
#include "support/cuda/routings.h"

#include "conclave/dtype.h"
#include "conclave/spec.h"

#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace conclave::testing {

// Block: 128x128 weight blocks, activations with one scale per row and 128 columns. Channel: one
// scale per weight row and one per activation row. Static: one scale per matrix, fixed activation
// steps.
QuantSpec fp8_block_quant();
QuantSpec fp8_channel_quant();
QuantSpec fp8_static_quant();

struct CudaProblemOptions {
  int64_t num_experts = 8;  // local experts; ids are local
  int64_t top_k = 2;
  int64_t hidden_size = 256;
  int64_t intermediate_size = 128;
  int64_t num_tokens = 16;
  DType weight_dtype = DType::kBF16;  // kBF16, kF16, kF32, kF8E4M3
  QuantSpec quant = {};               // for kF8E4M3
  ActivationSpec activation = {};
  // kF8E4M3: gate and up products have the deviation 2^up_exponent. Scales of down, and the static
  // step, allow for intermediate values of twice this exponent, as relu2 makes them, and silu too
  // where products are small.
  int up_exponent = 0;
  bool has_bias = false;
  bool weight_on_input = false;
  RoutingKind routing = RoutingKind::kUniform;
  int32_t routings = 1;       // differently routed batches of the same rows
  int32_t weight_copies = 1;  // different weights, if the active ones fit into L2
  uint64_t seed = 1;
};

class CudaProblem {
 public:
  // Fills everything on the current device. Throws Error if there is too little memory.
  explicit CudaProblem(const CudaProblemOptions& options);

  // Other rows and routings through the same weights, which stay in place. Results obtained for the
  // old ones (rows, ids, groups) become invalid.
  struct Batch {
    int64_t num_tokens = 0;
    RoutingKind routing = RoutingKind::kUniform;
    int32_t routings = 1;
    uint64_t seed = 1;
  };
  void set_batch(const Batch& batch);
  // The accuracy of the checked arithmetic for e4m3 activations; kTensorCoreAmbiguity unless set.
  void set_ambiguity(double ambiguity) { ambiguity_ = ambiguity; }

  const CudaProblemOptions& options() const { return options_; }
  experts::ExpertsProblem sizes() const;
  experts::DeviceExperts weights(int32_t copy = 0) const;
  // [T, H] in row_dtype().
  DeviceRows hidden() const { return hidden_; }
  // Makes an element of the token's row NaN, if rows are not quantised.
  void spoil_token(int64_t token);
  // Sets one bias of up, or of a gated product's gate; the problem must have biases.
  void set_up_bias(int64_t expert, int64_t feature, float value);
  void set_gate_bias(int64_t expert, int64_t feature, float value);
  // The rows that experts read: hidden, or its codes and scales.
  DeviceRows input() const { return codes_.data == nullptr ? hidden_ : codes_; }

  std::span<const int32_t> host_ids(int32_t routing) const;
  std::span<const float> host_weights(int32_t routing) const;
  const int32_t* topk_ids(int32_t routing = 0) const;    // on the device, [T, k]
  const float* topk_weights(int32_t routing = 0) const;  // on the device, [T, k]
  // Created and uploaded at the first call for a tile size: call it before capturing a graph.
  const GroupedRows& groups(int32_t tile_tokens, int32_t routing = 0);

  DType row_dtype() const;  // type of expert rows: that of kF16 and kF32 weights, kBF16 otherwise
  int64_t row_stride() const;
  int64_t output_bytes() const;  // for [T * k, row_stride()]
  // A call on groups(tile_tokens, routing) that writes rows of row_stride().
  experts::DeviceExpertsCall call(int32_t tile_tokens, int32_t routing, void* workspace,
                                  void* output);

  // The rows of input() in the order of groups(tile_tokens, routing), which kernels with
  // DeviceTile::sorted_input read. Enqueues the copies. Create it once before capturing a graph.
  DeviceRows sorted_input(int32_t tile_tokens, int32_t routing, CUstream_st* stream);

  // Checks expert rows [T * k, row_stride()] after a call, all of them or as many as float64 does
  // in about 50 ms: random ones and those at the ends of tiles. `output` was poisoned before the
  // call.
  RowErrors check_rows(const void* output, int32_t routing = 0, int32_t copy = 0) const;
  // Checks whole tokens: the weighted sum of a token's rows, with the layer's output_scale.
  RowErrors check_tokens(const OutputRows& output, double output_scale = 1, int32_t routing = 0,
                         int32_t copy = 0) const;

  // Checks these tokens in the same way; elements between the rows are ignored.
  RowErrors check_these_tokens(const OutputRows& output, std::span<const int64_t> tokens,
                               double output_scale = 1, int32_t routing = 0,
                               int32_t copy = 0) const;

  int64_t active_experts(int32_t routing = 0) const;
  int64_t active_weight_bytes(int32_t routing = 0) const;  // codes and scales
  double flops(int32_t routing = 0) const;

 private:
  struct Weights {
    cuda::DeviceBuffer gate_up, down, gate_up_bias, down_bias, gate_up_scale, down_scale;
  };
  struct Routing {
    HostRouting host;
    cuda::DeviceBuffer ids, weights;
  };
  struct Groups {
    cuda::DeviceBuffer expert_begin, row_slot, slot_row, tiles, num_tiles, sorted, sorted_scales;
    GroupedRows rows;
  };

  int64_t gate_up_rows() const;
  void set_bias(int64_t expert, int64_t row, float value);
  int64_t affordable_rows() const;
  void make_weights(int32_t copy);
  void make_scales(Weights& weights, uint64_t seed);
  void make_batch();
  void make_rows();
  void make_routing_of(int32_t routing);
  OracleProblem oracle_problem(int32_t routing, int32_t copy) const;

  CudaProblemOptions options_;
  double ambiguity_ = kTensorCoreAmbiguity;
  activation::Activation activation_;
  cuda::DeviceInfo device_;
  int64_t gate_up_stride_;
  int64_t down_stride_;
  std::vector<Weights> weights_;
  std::vector<Routing> routings_;
  std::map<std::pair<int32_t, int32_t>, Groups> groups_;  // by tile size and routing
  cuda::DeviceBuffer hidden_data_, code_data_, code_scales_, static_steps_;
  DeviceRows hidden_;
  DeviceRows codes_;
};

}  // namespace conclave::testing
