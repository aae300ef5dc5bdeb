#include "layer/cuda/arguments.h"

#include "layer/arguments.h"
#include "layer/cuda/memory_place.h"

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
  const auto check = [&](const char* name, const void* data) { check_place(name, data, ordinal); };
  check("hidden", args.hidden.data);
  check("router_logits", args.router_logits.data);
  check("topk_ids", args.topk_ids.data);
  check("topk_weights", args.topk_weights.data);
  check("router_input", args.router_input.data);
  check("residual_input", args.residual_input.data);
  check("token_ids", args.token_ids.data);
  check("padding_mask", args.padding_mask.data);
  check("num_tokens", args.num_tokens);
  check("out", args.out.data);
  check("shared_out", args.shared_out.data);
  check("captured_logits", args.captured_logits.data);
  check("captured_ids", args.captured_ids.data);
  check("captured_weights", args.captured_weights.data);
  check("expert_load", args.expert_load.data());
}

}  // namespace conclave::inline v0
