#include "experts/cuda/sm90/decode/decode.cuh"
#include "experts/cuda/sm90/decode/decode_kernels.h"

namespace conclave::inline v0::experts {

DecodeKernel find_decode_plain(DecodeElement element) {
  switch (element) {
    case DecodeElement::kBF16:
      return decode::decode_experts<DecodeElement::kBF16>;
    case DecodeElement::kF16:
      return decode::decode_experts<DecodeElement::kF16>;
    case DecodeElement::kE4M3Block:
      return decode::decode_experts<DecodeElement::kE4M3Block>;
    case DecodeElement::kE4M3Row:
      return decode::decode_experts<DecodeElement::kE4M3Row>;
    case DecodeElement::kInt8Row:
      return decode::decode_experts<DecodeElement::kInt8Row>;
    default:
      return nullptr;
  }
}

}  // namespace conclave::inline v0::experts
