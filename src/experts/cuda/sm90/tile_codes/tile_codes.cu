#include "experts/cuda/factor_planes.h"
#include "experts/cuda/sm90/code_values.h"
#include "experts/cuda/sm90/stream/codes_kernel.h"
#include "experts/cuda/sm90/stream/signed_bytes.h"
#include "experts/cuda/sm90/tile_codes/byte_steps.h"
#include "experts/cuda/sm90/tile_codes/kernels.h"
#include "experts/cuda/sm90/tile_codes/signed_bytes.h"
#include "experts/cuda/sm90/tile_codes/small_codes.h"
#include "experts/cuda/sm90/tile_codes/tile_codes.h"
#include "experts/cuda/sm90/tile_codes/times_steps.h"

namespace conclave::inline v0::experts {
namespace {

tile_codes::KernelPair find_kernels_of_signed_bytes(const ExpertsProblem& problem,
                                                    const DeviceTile& tile) {
  if (tile_codes_form(problem).whole_rows) {
    return tile_codes::find_kernels_of_rows_of_signed_bytes(tile);
  }
  switch (factor_form(problem)) {
    case FactorForm::kScaleSteps:
      return tile_codes::find_kernels_of_8_bits_with_steps(tile);
    case FactorForm::kSteps:
      return tile_codes::find_shifted_kernels_of_8_bits_with_steps(tile);
    case FactorForm::kOffsets:
      return tile_codes::find_shifted_kernels_of_8_bits(tile);
    default:
      return tile_codes::find_kernels_of_signed_bytes(tile);
  }
}

tile_codes::KernelPair find_kernels(const ExpertsProblem& problem, const DeviceTile& tile) {
  const TileCodesForm form = tile_codes_form(problem);
  if (are_signed_bytes(problem)) return find_kernels_of_signed_bytes(problem, tile);
  if (code_order(problem) == CodeOrder::kLanesOfSmallNumbers) {
    return tile_codes::find_kernels_of_small_codes(tile);
  }
  if (multiplies_steps(problem)) {
    return form.shifts ? tile_codes::find_shifted_kernels_times_steps(tile)
                       : tile_codes::find_kernels_times_steps(tile);
  }
  if (code_order(problem) == CodeOrder::kLanesOfNumbers) {
    if (form.whole_rows) return tile_codes::find_kernels_of_rows_in_order(tile);
    switch (factor_form(problem)) {
      case FactorForm::kZeros:
        return tile_codes::find_kernels_in_order_with_zeros(tile);
      case FactorForm::kOffsets:
        return tile_codes::find_kernels_in_order_with_offsets(tile);
      case FactorForm::kSteps:
        return tile_codes::find_kernels_in_order_with_steps(tile);
      default:
        return tile_codes::find_kernels_in_order(tile);
    }
  }
  if (code_order(problem) == CodeOrder::kLanesOfPairs) {
    if (form.pairs_in_terms) return tile_codes::find_kernels_of_pairs_in_terms(tile);
    return form.whole_rows ? tile_codes::find_kernels_of_rows_in_pairs(tile)
                           : tile_codes::find_kernels_of_pairs(tile);
  }
  if (takes_two_terms(problem.weight_dtype)) return tile_codes::find_kernels_of_two_terms(tile);
  if (form.whole_rows) {
    return form.bits == 4 ? tile_codes::find_kernels_of_4_bit_rows(tile)
                          : tile_codes::find_kernels_of_8_bit_rows(tile);
  }
  if (form.exact) {
    return has_scales_of_powers(problem) ? tile_codes::find_kernels_of_powers(tile)
                                         : tile_codes::find_kernels_of_floats(tile);
  }
  if (form.bits == 4) {
    return form.shifts ? tile_codes::find_shifted_kernels_of_4_bits(tile)
                       : tile_codes::find_kernels_of_4_bits(tile);
  }
  return tile_codes::find_kernels_of_8_bits(tile);
}

}  // namespace

std::unique_ptr<DeviceExpertsKernel> make_tile_codes(const ExpertsProblem& problem,
                                                     const DeviceExperts& weights,
                                                     const DeviceTile& tile) {
  constexpr KernelNames kNames{.row = "cuda.tile_codes_sm90",
                               .up = "experts.tile_codes_sm90.up",
                               .down = "experts.tile_codes_sm90.down"};
  tile_codes::KernelPair kernels = find_kernels(problem, tile);
  kernels.down = find_kernels(problem, tile_codes_down_tile(problem, tile)).down;
  return make_codes_kernel(kNames, kernels, problem, weights, tile);
}

}  // namespace conclave::inline v0::experts
