#include "layer/cuda/arguments.h"

#include "cuda/memory_place.h"
#include "layer/arguments.h"
#include "layer/call_tensors.h"
#include "layer/choice_limits.h"

#include "conclave/error.h"

namespace conclave::inline v0 {
namespace {

// Limits of a call's choices. Flags for all tokens that lie in host memory are read by the call.
void check_limits(const ForwardArgs& args, const MoeSpec& spec, int32_t ordinal) {
  ChoiceLimits limits = ChoiceLimits::of(args);
  if (!limits.any()) return;
  const int64_t tokens = args.hidden.shape[0];
  const ConstTensorView& banned = args.banned_experts;
  limits.hides_bans =
      banned.shape.rank() == 2 ||
      (banned.data != nullptr && cuda::is_on_device("banned_experts", banned.data, ordinal));
  check_choice_limits(limits, spec, tokens, tokens);
}

}  // namespace

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
  check_limits(args, spec, ordinal);
  if (args.hidden.shape[0] == 0) return;
  const auto check = [&](const char* name, const void* data) {
    cuda::check_place(name, data, ordinal);
  };
  for (const CallInput& input : kCallInputs) {
    const ConstTensorView& view = args.*input.view;
    const bool may_lie_on_host = !input.has_rows && view.shape.rank() == 1;
    if (!may_lie_on_host) check(input.name, view.data);
  }
  check("num_tokens", args.num_tokens);
  for (const CallOutput& output : kCallOutputs) check(output.name, (args.*output.view).data);
  check("expert_load", args.expert_load.data());
}

}  // namespace conclave::inline v0
