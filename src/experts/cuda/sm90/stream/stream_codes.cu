#include "experts/cuda/sm90/stream/codes_kernel.h"
#include "experts/cuda/sm90/stream/codes_product.cuh"
#include "experts/cuda/sm90/stream/stream_codes.h"

#include "conclave/error.h"

namespace conclave::inline v0::experts {
namespace {

using stream::CodedParams;
using stream::Codes;
using stream::Shape;
using KernelPair = stream::KernelPairOf<CodedParams>;

[[noreturn]] void refuse_tile(const DeviceTile& tile) {
  throw Error(ErrorCode::kUnsupported,
              {.what = "cuda.stream_codes_sm90 has no such tile", .found = to_string(tile)});
}

template <int kTokens, Codes kCodes, int kWeightRows = 128>
KernelPair pair_of_tile() {
  constexpr CodeKernelForm kForm{
      .bits = kCodes.bits, .fine = kCodes.steps_of_sum == 1, .offsets = kCodes.offsets};
  constexpr Shape kShape{.max_tokens = kTokens,
                         .weight_rows = kWeightRows,
                         .atoms = kCodes.bits == 4 ? 4 : 2,
                         .stages = code_stages(kForm, kTokens, kWeightRows),
                         .consumers = kWeightRows / 64};
  return stream::codes_kernels<kShape, kCodes>();
}

// The kernels of the tiles of stream_codes.cc, in the forms that have all of them.
template <Codes kCodes>
KernelPair find_in_all(const DeviceTile& tile) {
  const bool wide = tile.features == 256;
  switch (tile.tokens) {
    case 16:
      return wide ? pair_of_tile<16, kCodes, 256>() : pair_of_tile<16, kCodes>();
    case 32:
      return wide ? pair_of_tile<32, kCodes, 256>() : pair_of_tile<32, kCodes>();
    case 64:
      return pair_of_tile<64, kCodes>();
    case 96:
      return pair_of_tile<96, kCodes>();
    default:
      refuse_tile(tile);
  }
}

// The same in the other forms.
template <Codes kCodes>
KernelPair find_in_few(const DeviceTile& tile) {
  if (tile.tokens == 16) return pair_of_tile<16, kCodes>();
  if (tile.tokens == 64) return pair_of_tile<64, kCodes>();
  refuse_tile(tile);
}

template <int kBits>
KernelPair find_kernels(const CodeKernelForm& form, const DeviceTile& tile) {
  if (form.fine) {
    return form.offsets ? find_in_few<Codes{kBits, 1, true}>(tile)
                        : find_in_few<Codes{kBits, 1}>(tile);
  }
  return form.offsets ? find_in_few<Codes{kBits, 2, true}>(tile)
                      : find_in_all<Codes{kBits, 2}>(tile);
}

KernelPair find_kernels(const ExpertsProblem& problem, const DeviceTile& tile) {
  const CodeKernelForm form = code_kernel_form(problem);
  if (form.two_terms) {
    return form.fine ? find_in_few<Codes{4, 1, false, 2}>(tile)
                     : find_in_few<Codes{4, 2, false, 2}>(tile);
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
