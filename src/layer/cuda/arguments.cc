#include "layer/cuda/arguments.h"

#include "cuda/memory_place.h"
#include "layer/arguments.h"
#include "layer/call_tensors.h"

#include "conclave/error.h"

namespace conclave::inline v0 {
void check_cuda_arguments(const ForwardArgs& args, const MoeSpec& spec,
                          const routing::RouterTraits& router, int32_t ordinal) {
  if (args.stream.handle == nullptr) {
    throw Error(ErrorCode::kNullPointer,
                {.what = "a layer on CUDA needs a stream",
                 .tensor = "stream",
                 .hint = "conclave/interop/cuda.h: to_stream, also for the default stream"});
  }
  if (args.timings != nullptr) {
    throw Error(ErrorCode::kUnsupported, {.what = "stages overlap on CUDA: they have no times",
                                          .tensor = "timings",
                                          .hint = "time the stream with events"});
  }
  check_tensors(args, spec, router);
  if (args.hidden.shape[0] == 0) return;
  const auto check = [&](const char* name, const void* data) {
    cuda::check_place(name, data, ordinal);
  };
  for (const CallInput& input : kCallInputs) check(input.name, (args.*input.view).data);
  check("num_tokens", args.num_tokens);
  for (const CallOutput& output : kCallOutputs) check(output.name, (args.*output.view).data);
  check("expert_load", args.expert_load.data());
}

}  // namespace conclave::inline v0
