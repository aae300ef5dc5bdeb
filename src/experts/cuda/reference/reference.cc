#include "experts/cuda/reference/reference.h"

#include "core/checked.h"
#include "experts/cuda/factor_planes.h"
#include "quant/gpu_rows.h"
#include "quant/weight_format.h"

#include <array>

namespace conclave::inline v0::experts {
namespace {

// The kernel walks over rows, not tiles, so any tile size serves.
constexpr std::array kTiles = {DeviceTile{.tokens = 64, .features = 1, .depth = 0, .stages = 1}};

class ReferenceKernel final : public DeviceExpertsKernel {
 public:
  ReferenceKernel(const ExpertsProblem& problem, const DeviceExperts& weights,
                  const DeviceTile& tile)
      : problem_(problem), weights_(weights), tile_(tile) {}

  int32_t tile_tokens() const override { return tile_.tokens; }

  std::string describe() const override { return "cuda.reference, one warp per element"; }

  void run(const DeviceExpertsCall& call, CUstream_st* stream) const override {
    detail::run_reference(problem_, weights_, call, stream);
  }

 private:
  ExpertsProblem problem_;
  DeviceExperts weights_;
  DeviceTile tile_;
};

class AdaptedReference final : public AdapterKernel {
 public:
  AdaptedReference(const ExpertsProblem& problem, const DeviceExperts& weights,
                   const DeviceTile& tile)
      : problem_(problem), weights_(weights), tile_(tile) {}

  int32_t tile_tokens() const override { return tile_.tokens; }

  void run(const AdaptedCall& call, CUstream_st* stream) const override {
    detail::run_adapted_reference(problem_, weights_, call, stream);
  }

 private:
  ExpertsProblem problem_;
  DeviceExperts weights_;
  DeviceTile tile_;
};

// The kernel finds the scales of blocks by itself.
Support has_even_groups(const ExpertsProblem& problem) {
  const OrderedColumns& ordered = problem.ordered;
  const int64_t block = problem.quant.block_cols;
  if (ordered.gate_up == 0 || (ordered.gate_up_group == block && ordered.down_group == block)) {
    return Support::yes();
  }
  return Support::no("takes orders that give each group " + std::to_string(block) +
                     " columns of this rank");
}

}  // namespace

Support reference_supports(const ExpertsProblem& problem) {
  if (Support device = cuda::runs_plain_kernels(problem.gpu()); !device) return device;
  const DType dtype = problem.weight_dtype;
  const quant::WeightFormat* format = quant::find_format(dtype);
  if (format != nullptr && format->codes != nullptr &&
      !quant::value_rows_support(dtype, problem.quant)) {
    if (Support rows = quant::code_rows_support(dtype, problem.quant); !rows) return rows;
  }
  if (Support slice = begins_with_block(problem); !slice) return slice;
  if (Support order = has_even_groups(problem); !order) return order;
  if (format != nullptr) return Support::yes();
  return Support::no("takes " + quant::known_formats(true) + " weights; found " +
                     std::string(conclave::to_string(dtype)));
}

size_t reference_bytes(const ExpertsProblem& problem, int64_t tokens) {
  // The intermediate rows are float32.
  return static_cast<size_t>(tokens * problem.top_k * problem.intermediate_size) * sizeof(float);
}

std::span<const DeviceTile> reference_tiles(const ExpertsProblem&) { return kTiles; }

std::unique_ptr<DeviceExpertsKernel> make_reference(const ExpertsProblem& problem,
                                                    const DeviceExperts& weights,
                                                    const DeviceTile& tile) {
  return std::make_unique<ReferenceKernel>(problem, weights, tile);
}

std::unique_ptr<AdapterKernel> make_adapted_reference(const ExpertsProblem& problem,
                                                      const DeviceExperts& weights,
                                                      const DeviceTile& tile) {
  return std::make_unique<AdaptedReference>(problem, weights, tile);
}

}  // namespace conclave::inline v0::experts
