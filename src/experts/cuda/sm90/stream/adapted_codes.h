// "cuda.stream_codes_sm90" for rows that have adapters.
#pragma once

#include "experts/cuda/adapters/adapter_kernel.h"
#include "experts/cuda/sm90/stream/stream_codes.h"

#include <memory>
#include <span>

namespace conclave::inline v0::experts {

// Takes what stream_codes_supports, but no factors of columns: terms are of rows without them.
Support adapted_codes_supports(const ExpertsProblem& problem);
// Codes in the order of lanes take few instructions and registers, and have tiles of four
// warpgroups too.
constexpr bool has_lanes(const CodeKernelForm& form) {
  return form.bits <= 4 && (form.in_order || form.in_pairs || form.exact);
}
// Those of 4 bits in another order are of few checkpoints, and have tiles of few tokens alone.
constexpr bool has_tiles_of_many_tokens(const CodeKernelForm& form) {
  return form.bits == 8 || has_lanes(form);
}
std::span<const DeviceTile> adapted_codes_tiles(const ExpertsProblem& problem);
std::unique_ptr<AdapterKernel> make_adapted_codes(const ExpertsProblem& problem,
                                                  const DeviceExperts& weights,
                                                  const DeviceTile& tile);

}  // namespace conclave::inline v0::experts
