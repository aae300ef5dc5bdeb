#include "experts/cuda/sm90/stream/adapted_codes_as_stored.cuh"

namespace conclave::inline v0::experts::stream {
namespace {

template <int kBits>
AdaptedCodesPair find_of_bits(const CodeKernelForm& form, const DeviceTile& tile) {
  if (form.columns_of_sum == 16) {
    return form.offsets
               ? find_adapted<Codes{.bits = kBits, .steps_of_sum = 1, .offsets = true}>(tile)
               : find_adapted<Codes{.bits = kBits, .steps_of_sum = 1}>(tile);
  }
  return form.offsets ? find_adapted<Codes{.bits = kBits, .steps_of_sum = 2, .offsets = true}>(tile)
                      : find_adapted<Codes{.bits = kBits, .steps_of_sum = 2}>(tile);
}

}  // namespace

AdaptedCodesPair find_adapted_as_stored(const CodeKernelForm& form, const DeviceTile& tile) {
  return form.bits == 4 ? find_of_bits<4>(form, tile) : find_of_bits<8>(form, tile);
}

AdaptedCodesPair find_adapted_of_terms(const CodeKernelForm& form, const DeviceTile& tile) {
  return form.columns_of_sum == 16
             ? find_adapted<Codes{.bits = 4, .steps_of_sum = 1, .terms = 2}>(tile)
             : find_adapted<Codes{.bits = 4, .steps_of_sum = 2, .terms = 2}>(tile);
}

}  // namespace conclave::inline v0::experts::stream
