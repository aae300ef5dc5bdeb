#include "experts/cuda/sm90/decode/decode.cuh"
#include "experts/cuda/sm90/decode/decode_kernels.h"

namespace conclave::inline v0::experts {

DecodeKernel find_decode_codes(DecodeElement element) {
  switch (element) {
    case DecodeElement::kCodes4:
      return decode::decode_experts<DecodeElement::kCodes4>;
    case DecodeElement::kCodes4Offsets:
      return decode::decode_experts<DecodeElement::kCodes4Offsets>;
    case DecodeElement::kCodes4Terms:
      return decode::decode_experts<DecodeElement::kCodes4Terms>;
    case DecodeElement::kCodes8:
      return decode::decode_experts<DecodeElement::kCodes8>;
    case DecodeElement::kWholes8:
      return decode::decode_experts<DecodeElement::kWholes8>;
    case DecodeElement::kCodes8Offsets:
      return decode::decode_experts<DecodeElement::kCodes8Offsets>;
    case DecodeElement::kCodes8Steps:
      return decode::decode_experts<DecodeElement::kCodes8Steps>;
    case DecodeElement::kCodes8OffsetSteps:
      return decode::decode_experts<DecodeElement::kCodes8OffsetSteps>;
    default:
      return nullptr;
  }
}

}  // namespace conclave::inline v0::experts
