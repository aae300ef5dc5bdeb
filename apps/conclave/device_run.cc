#include "device_run.h"

#include "conclave/device_queue.h"

#include <algorithm>
#include <vector>

namespace conclave::tool {
namespace {

// Holds the inputs and outputs of a call as long as it runs.
class DeviceTensors {
 public:
  explicit DeviceTensors(const DeviceQueue& queue) : queue_(queue) {}

  // Returns an empty view for an empty tensor.
  ConstTensorView upload(const ConstTensorView& tensor) {
    if (tensor.empty()) return {};
    tensors_.push_back(queue_.upload(tensor));
    return tensors_.back().const_view();
  }
  TensorView allocate_like(const Tensor& tensor) {
    tensors_.push_back(queue_.allocate(tensor.dtype(), tensor.shape()));
    return tensors_.back().view();
  }

 private:
  const DeviceQueue& queue_;
  std::vector<DeviceTensor> tensors_;
};

ConstTensorView load_view(std::vector<int64_t>& load) {
  return {.data = load.data(), .dtype = DType::kI64, .shape = {static_cast<int64_t>(load.size())}};
}

}  // namespace

void run_on_device(const Context& context, const MoeLayer& layer, const LayerInput& input,
                   int32_t repetitions, LayerRun& run) {
  // A rank without tokens takes part in the others' exchanges.
  const auto has_none = [](int64_t tokens) { return tokens == 0; };
  if (input.num_tokens() == 0 && std::ranges::all_of(input.rank_tokens, has_none)) return;
  const DeviceQueue queue(context);
  Workspace workspace(context, layer.workspace_bytes());
  DeviceTensors tensors(queue);
  ForwardArgs args{.hidden = tensors.upload(input.hidden),
                   .router_logits = tensors.upload(input.router_logits),
                   .topk_ids = tensors.upload(input.topk_ids),
                   .topk_weights = tensors.upload(input.topk_weights),
                   .router_input = tensors.upload(input.router_input),
                   .residual_input = tensors.upload(input.residual_input),
                   .token_ids = tensors.upload(input.token_ids),
                   .top_k = input.top_k,
                   .banned_experts = input.banned_experts,
                   .expert_budget = input.expert_budget,
                   .out = tensors.allocate_like(run.output),
                   .rank_tokens = input.rank_tokens,
                   .workspace = &workspace,
                   .stream = queue.stream()};
  ForwardArgs capture = args;
  capture.captured_ids = tensors.allocate_like(run.topk_ids);
  capture.captured_weights = tensors.allocate_like(run.topk_weights);
  if (run.has_logits()) capture.captured_logits = tensors.allocate_like(run.logits);
  const ConstTensorView load = tensors.upload(load_view(run.expert_load));
  capture.expert_load = {static_cast<int64_t*>(const_cast<void*>(load.data)),
                         run.expert_load.size()};
  layer.forward(capture);
  queue.download(capture.out, run.output.view());
  queue.download(capture.captured_ids, run.topk_ids.view());
  queue.download(capture.captured_weights, run.topk_weights.view());
  if (run.has_logits()) queue.download(capture.captured_logits, run.logits.view());
  const ConstTensorView host_load = load_view(run.expert_load);
  queue.download(
      load, {.data = run.expert_load.data(), .dtype = host_load.dtype, .shape = host_load.shape});
  if (repetitions > 0) {
    run.median_ms = queue.time_ms([&] { layer.forward(args); }, repetitions);
  }
}

}  // namespace conclave::tool
