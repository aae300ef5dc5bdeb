#include "cuda/launch.h"
#include "experts/cuda/sm90/decode/decode.cuh"

namespace conclave::inline v0::experts {
namespace {

using Kernel = void (*)(DecodeParams);

Kernel find_kernel(DecodeElement element) {
  switch (element) {
    case DecodeElement::kF16:
      return decode::decode_experts<DecodeElement::kF16>;
    case DecodeElement::kE4M3Block:
      return decode::decode_experts<DecodeElement::kE4M3Block>;
    case DecodeElement::kE4M3Row:
      return decode::decode_experts<DecodeElement::kE4M3Row>;
    case DecodeElement::kInt8Row:
      return decode::decode_experts<DecodeElement::kInt8Row>;
    case DecodeElement::kCodes4:
      return decode::decode_experts<DecodeElement::kCodes4>;
    case DecodeElement::kCodes4InOrder:
      return decode::decode_experts<DecodeElement::kCodes4InOrder>;
    case DecodeElement::kCodes4InOrderOffsets:
      return decode::decode_experts<DecodeElement::kCodes4InOrderOffsets>;
    case DecodeElement::kCodes4InOrderSteps:
      return decode::decode_experts<DecodeElement::kCodes4InOrderSteps>;
    case DecodeElement::kCodes4Offsets:
      return decode::decode_experts<DecodeElement::kCodes4Offsets>;
    case DecodeElement::kCodes4InPairs:
      return decode::decode_experts<DecodeElement::kCodes4InPairs>;
    case DecodeElement::kCodes4PairsInTerms:
      return decode::decode_experts<DecodeElement::kCodes4PairsInTerms>;
    case DecodeElement::kCodes4Terms:
      return decode::decode_experts<DecodeElement::kCodes4Terms>;
    case DecodeElement::kCodes4Powers:
      return decode::decode_experts<DecodeElement::kCodes4Powers>;
    case DecodeElement::kCodes4Floats:
      return decode::decode_experts<DecodeElement::kCodes4Floats>;
    case DecodeElement::kCodes8:
      return decode::decode_experts<DecodeElement::kCodes8>;
    case DecodeElement::kCodes8Offsets:
      return decode::decode_experts<DecodeElement::kCodes8Offsets>;
    case DecodeElement::kCodes8Steps:
      return decode::decode_experts<DecodeElement::kCodes8Steps>;
    case DecodeElement::kCodes8OffsetSteps:
      return decode::decode_experts<DecodeElement::kCodes8OffsetSteps>;
    case DecodeElement::kBF16:
      break;
  }
  return decode::decode_experts<DecodeElement::kBF16>;
}

}  // namespace

void prepare_decode(DecodeElement element, size_t shared_bytes) {
  cuda::allow_shared_bytes(reinterpret_cast<const void*>(find_kernel(element)), shared_bytes);
}

void launch_decode(DecodeElement element, const DecodeParams& params, CUstream_st* stream) {
  cuda::launch("experts.decode_sm90", find_kernel(element),
               {.blocks = params.plan.blocks,
                .threads = decode_threads(params.plan.has_lanes),
                .shared_bytes = params.shared.total,
                .residency = cuda::Residency::kCooperative,
                .stream = stream},
               params);
}

}  // namespace conclave::inline v0::experts
