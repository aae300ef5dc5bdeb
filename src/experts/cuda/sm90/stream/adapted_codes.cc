#include "experts/cuda/sm90/stream/adapted_codes.h"

#include "experts/cuda/sm90/stream/adapted_offsets.h"
#include "experts/cuda/sm90/stream/stream_codes.h"

#include <array>

namespace conclave::inline v0::experts {
namespace {

// Every form of codes has kernels for these; how many stages they have depends on the form.
constexpr std::array kTiles = {DeviceTile{.tokens = 16, .features = 128, .depth = 128},
                               DeviceTile{.tokens = 64, .features = 128, .depth = 128}};

Support takes_codes(const ExpertsProblem& problem) {
  if (problem.quant.has_column_factors) return Support::no("takes no factors of columns");
  return stream_codes_supports(problem);
}

// Their products without adapters are those of stream/offset_products.cuh, which have other bits.
bool has_summed_rows(const ExpertsProblem& problem) {
  const CodeKernelForm form = code_kernel_form(problem);
  return form.in_order && form.offsets;
}

}  // namespace

Support adapted_codes_supports(const ExpertsProblem& problem) {
  if (Support codes = takes_codes(problem); !codes) return codes;
  if (!has_summed_rows(problem)) return Support::yes();
  return Support::no("multiplies offsets by other sums than the kernel without adapters");
}

Support adapted_offsets_supports(const ExpertsProblem& problem) {
  if (Support codes = takes_codes(problem); !codes) return codes;
  if (has_summed_rows(problem)) return Support::yes();
  return Support::no("takes codes in the order of lanes that have offsets");
}

std::span<const DeviceTile> adapted_codes_tiles(const ExpertsProblem& /*problem*/) {
  return kTiles;
}

}  // namespace conclave::inline v0::experts
