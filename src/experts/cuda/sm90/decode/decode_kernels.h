// Kernels of the single launch, in files that compile side by side.
#pragma once

#include "experts/cuda/sm90/decode/decode.h"

namespace conclave::inline v0::experts {

using DecodeKernel = void (*)(DecodeParams);

// Null for elements of another file.
DecodeKernel find_decode_plain(DecodeElement element);
DecodeKernel find_decode_codes(DecodeElement element);  // as stored
DecodeKernel find_decode_lanes(DecodeElement element);  // codes in the order of lanes
DecodeKernel find_decode_small(DecodeElement element);  // codes of 2 bits

}  // namespace conclave::inline v0::experts
