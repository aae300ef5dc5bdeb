#include "experts/cuda/sm90/decode/decode.cuh"
#include "experts/cuda/sm90/decode/decode_kernels.h"

namespace conclave::inline v0::experts {

DecodeKernel find_decode_small(DecodeElement element) {
  return element == DecodeElement::kCodes2 ? decode::decode_experts<DecodeElement::kCodes2>
                                           : nullptr;
}

}  // namespace conclave::inline v0::experts
