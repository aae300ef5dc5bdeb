#include "experts/cuda/sm90/stream/codes_kernel.h"
#include "experts/cuda/sm90/stream/codes_products.h"

#include <string>

namespace conclave::inline v0::experts {
namespace {

using stream::CodedParams;
using KernelPair = stream::KernelPairOf<CodedParams>;

class CodesKernel final : public DeviceExpertsKernel {
 public:
  CodesKernel(const KernelNames& names, const KernelPair& kernels, const ExpertsProblem& problem,
              const DeviceExperts& weights, const DeviceTile& tile)
      : products_(names, kernels, problem, weights, tile) {
    products_.begin_by_tiles();
  }

  int32_t tile_tokens() const override { return products_.tile().tokens; }
  std::string describe() const override { return products_.describe(); }

  void run(const DeviceExpertsCall& call, CUstream_st* stream) const override {
    if (call.groups.max_rows == 0) return;
    const auto rows = products_.place_intermediate(call);
    products_.run_up(call, rows, products_.up(), stream);
    if (products_.rounds_rows()) products_.round_rows(call, rows, stream);
    products_.run_down(call, rows, products_.down(), stream);
  }

 private:
  stream::CodesProducts<CodedParams> products_;
};

}  // namespace

std::unique_ptr<DeviceExpertsKernel> make_codes_kernel(const KernelNames& names,
                                                       const KernelPair& kernels,
                                                       const ExpertsProblem& problem,
                                                       const DeviceExperts& weights,
                                                       const DeviceTile& tile) {
  return std::make_unique<CodesKernel>(names, kernels, problem, weights, tile);
}

}  // namespace conclave::inline v0::experts
