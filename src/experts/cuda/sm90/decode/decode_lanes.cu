#include "experts/cuda/sm90/decode/decode.cuh"
#include "experts/cuda/sm90/decode/decode_kernels.h"

namespace conclave::inline v0::experts {

DecodeKernel find_decode_lanes(DecodeElement element) {
  switch (element) {
    case DecodeElement::kCodes4InOrder:
      return decode::decode_experts<DecodeElement::kCodes4InOrder>;
    case DecodeElement::kCodes4InOrderOffsets:
      return decode::decode_experts<DecodeElement::kCodes4InOrderOffsets>;
    case DecodeElement::kCodes4InOrderSteps:
      return decode::decode_experts<DecodeElement::kCodes4InOrderSteps>;
    case DecodeElement::kCodes4TimesSteps:
      return decode::decode_experts<DecodeElement::kCodes4TimesSteps>;
    case DecodeElement::kCodes4TimesOffsetSteps:
      return decode::decode_experts<DecodeElement::kCodes4TimesOffsetSteps>;
    case DecodeElement::kCodes4InPairs:
      return decode::decode_experts<DecodeElement::kCodes4InPairs>;
    case DecodeElement::kCodes4PairsInTerms:
      return decode::decode_experts<DecodeElement::kCodes4PairsInTerms>;
    case DecodeElement::kCodes4Powers:
      return decode::decode_experts<DecodeElement::kCodes4Powers>;
    case DecodeElement::kCodes4Floats:
      return decode::decode_experts<DecodeElement::kCodes4Floats>;
    default:
      return nullptr;
  }
}

}  // namespace conclave::inline v0::experts
