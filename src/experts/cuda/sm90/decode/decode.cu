#include "core/dcheck.h"
#include "cuda/launch.h"
#include "experts/cuda/sm90/decode/decode.h"
#include "experts/cuda/sm90/decode/decode_kernels.h"

namespace conclave::inline v0::experts {
namespace {

DecodeKernel find_kernel(DecodeElement element) {
  for (const auto find :
       {find_decode_plain, find_decode_codes, find_decode_lanes, find_decode_small}) {
    if (DecodeKernel const kernel = find(element); kernel != nullptr) return kernel;
  }
  CONCLAVE_DCHECK(false);
  return nullptr;
}

}  // namespace

void prepare_decode(DecodeElement element, size_t shared_bytes) {
  cuda::allow_shared_bytes(reinterpret_cast<const void*>(find_kernel(element)), shared_bytes);
}

void launch_decode(DecodeElement element, const DecodeParams& params, CUstream_st* stream) {
  cuda::launch("experts.decode_sm90", find_kernel(element),
               {.blocks = params.plan.blocks,
                .threads = kDecodeThreads,
                .shared_bytes = params.shared.total,
                .residency = cuda::Residency::kCooperative,
                .stream = stream},
               params);
}

}  // namespace conclave::inline v0::experts
