#include "experts/cuda/sm90/stream/byte_offset_kernels.h"
#include "experts/cuda/sm90/stream/byte_offsets.h"
#include "experts/cuda/sm90/stream/codes_kernel.h"
#include "experts/cuda/sm90/stream/codes_tiles.cuh"
#include "experts/cuda/sm90/stream/signed_byte_kernels.h"
#include "experts/cuda/sm90/stream/signed_bytes.h"
#include "experts/cuda/sm90/stream/small_codes.h"
#include "experts/cuda/sm90/stream/stream_codes.h"

namespace conclave::inline v0::experts {
namespace {

using stream::Codes;
using stream::find_in_all;
using stream::pair_of_tile;
using stream::refuse_tile;
using KernelPair = stream::CodesKernelPair;

// The same in the other forms.
template <Codes kCodes>
KernelPair find_in_few(const DeviceTile& tile) {
  if (tile.tokens == 16) return pair_of_tile<16, kCodes>();
  if (tile.tokens == 64) return pair_of_tile<64, kCodes>();
  refuse_tile(tile);
}

// Codes as stored.
template <int kBits>
KernelPair find_kernels(const CodeKernelForm& form, const DeviceTile& tile) {
  if (form.columns_of_sum == 16) {
    return form.offsets
               ? find_in_few<Codes{.bits = kBits, .steps_of_sum = 1, .offsets = true}>(tile)
               : find_in_few<Codes{.bits = kBits, .steps_of_sum = 1}>(tile);
  }
  if (form.offsets) {
    return find_in_few<Codes{.bits = kBits, .steps_of_sum = 2, .offsets = true}>(tile);
  }
  constexpr Codes kCodes{.bits = kBits, .steps_of_sum = 2};
  if constexpr (kBits == 8) {
    return find_in_all<kCodes>(tile);
  } else {
    return find_in_few<kCodes>(tile);
  }
}

KernelPair find_kernels(const ExpertsProblem& problem, const DeviceTile& tile) {
  const CodeKernelForm form = code_kernel_form(problem);
  if (form.exact) {
    return form.columns_of_sum == 16 ? stream::find_kernels_of_floats(tile)
                                     : stream::find_kernels_of_powers(tile);
  }
  if (form.two_terms) {
    if (form.in_pairs) return stream::find_kernels_of_pairs_in_terms(tile);
    return form.columns_of_sum == 16
               ? find_in_few<Codes{.bits = 4, .steps_of_sum = 1, .terms = 2}>(tile)
               : find_in_few<Codes{.bits = 4, .steps_of_sum = 2, .terms = 2}>(tile);
  }
  if (form == kSmallCodesForm) return stream::find_kernels_of_small_codes(tile);
  if (multiplies_steps(form)) {
    return form.offsets ? stream::find_shifted_kernels_times_steps(tile)
                        : stream::find_kernels_times_steps(tile);
  }
  if (form.steps && !form.offsets) return stream::find_kernels_of_steps(tile);
  if (is_byte_offsets(form)) {
    return form.steps ? stream::find_kernels_of_bytes_with_steps(tile)
                      : stream::find_kernels_of_bytes_with_offsets(tile);
  }
  if (form == kSignedBytesForm) return stream::find_kernels_of_signed_bytes(tile);
  if (form.in_order) {
    if (form.steps) return stream::find_kernels_in_order_with_steps(tile);
    if (form.offsets) return stream::find_kernels_in_order_with_offsets(tile);
    return form.columns_of_sum == 128 ? stream::find_kernels_of_long_sums(tile)
                                      : stream::find_kernels_in_order(tile);
  }
  if (form.in_pairs) {
    return form.columns_of_sum == 64 ? stream::find_kernels_of_wide_pairs(tile)
                                     : stream::find_kernels_of_pairs(tile);
  }
  return form.bits == 4 ? find_kernels<4>(form, tile) : find_kernels<8>(form, tile);
}

}  // namespace

std::unique_ptr<DeviceExpertsKernel> make_stream_codes(const ExpertsProblem& problem,
                                                       const DeviceExperts& weights,
                                                       const DeviceTile& tile) {
  constexpr KernelNames kNames{.row = "cuda.stream_codes_sm90",
                               .up = "experts.stream_codes_sm90.up",
                               .down = "experts.stream_codes_sm90.down"};
  return make_codes_kernel(kNames, find_kernels(problem, tile), problem, weights, tile);
}

}  // namespace conclave::inline v0::experts
