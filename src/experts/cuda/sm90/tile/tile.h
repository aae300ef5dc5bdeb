// "cuda.tile_sm90": experts with many rows each, in bf16 and f16. Tokens are the M side of wgmma.
#pragma once

#include "experts/cuda/device_experts.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace conclave::inline v0::experts {

// One of the two products.
struct ProductTile {
  int32_t features = 256;
  int32_t stages = 4;
  int32_t cluster = 1;
  int32_t group = 0;     // token tiles walked together; 0: token_tiles_of_group decides
  bool gathers = false;  // an up product that reads rows in token order
  friend bool operator==(const ProductTile&, const ProductTile&) = default;
};
struct TilePlan {
  int32_t tokens = 128;
  ProductTile up;
  ProductTile down;
};

Support tile_sm90_supports(const ExpertsProblem& problem);
std::span<const DeviceTile> tile_sm90_tiles(const ExpertsProblem& problem);
// The plan of both products that a tile of the table stands for, for this problem.
TilePlan tile_sm90_plan(const ExpertsProblem& problem, const DeviceTile& tile);
std::string to_string(const TilePlan& plan);
// True for formulas with a fused form, which every up kernel with a gate computes; the others need
// one with Formulas::kAll.
bool tile_sm90_common(const activation::Activation& activation);

// Shape from which token_tiles_of_group finds how many token tiles should run at one time, so that
// their rows and weights are read from L2 as often as possible.
struct GroupShape {
  int32_t tile_tokens = 0;
  int32_t tile_features = 0;
  int64_t depth_bytes = 0;
};
int32_t token_tiles_of_group(const GroupShape& shape, const cuda::DeviceInfo& device);

// The queues of the two products lie in the workspace before the intermediate.
inline constexpr size_t kTileQueueBytes = 256;
// Elements from one intermediate row to the next: whole lines of 128 bytes.
int64_t tile_sm90_stride(const ExpertsProblem& problem);
size_t tile_sm90_bytes(const ExpertsProblem& problem, int64_t tokens);

// Defined in tile.cu, which builds with CUDA only.
std::unique_ptr<DeviceExpertsKernel> make_tile_sm90(const ExpertsProblem& problem,
                                                    const DeviceExperts& weights,
                                                    const DeviceTile& tile);
// For measurements: takes a plan that no tile stands for. Throws Error(kInvalidArgument) if no
// kernel was built for it.
std::unique_ptr<DeviceExpertsKernel> make_tile_sm90_plan(const ExpertsProblem& problem,
                                                         const DeviceExperts& weights,
                                                         const TilePlan& plan);

}  // namespace conclave::inline v0::experts
