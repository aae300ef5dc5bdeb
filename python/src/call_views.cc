#include "call_views.h"

#include "conclave/error.h"
#include "conclave/interop/cuda.h"

#include <string>

namespace conclave::python {

const Array& CallViews::keep(nb::handle object, const char* name) {
  const Array& array = kept_.emplace_back(object, name, stream_);
  array.require_device(device_);
  return array;
}

ConstTensorView CallViews::input(nb::handle object, const char* name, const char* shape, int rank) {
  if (object.is_none()) return {};
  const Array& array = keep(object, name);
  return rank == 1 ? array.vector(shape) : array.matrix(shape);
}

TensorView CallViews::output(nb::handle object, const char* name, const char* shape) {
  if (object.is_none()) return {};
  return keep(object, name).writable_matrix(shape);
}

// Accepts a number, or int64 [1] on the layer's device.
void CallViews::take_num_tokens(nb::handle object) {
  if (object.is_none()) return;
  if (nb::isinstance<nb::int_>(object)) {
    num_tokens_ = nb::cast<int64_t>(object);
    if (device_.is_cuda) {
      throw Error(ErrorCode::kDevice, {.what = "a layer on CUDA reads this number on the device",
                                       .tensor = "num_tokens",
                                       .expected = "an int64 tensor of one element there",
                                       .found = "a Python integer"});
    }
    args.num_tokens = &num_tokens_;
    return;
  }
  const ConstTensorView view = keep(object, "num_tokens").vector("[1]");
  if (view.dtype != DType::kI64 || view.shape[0] != 1) {
    throw Error(ErrorCode::kDType,
                {.what = "an argument has the wrong type",
                 .tensor = "num_tokens",
                 .expected = "int64 [1]",
                 .found = std::string(dtype_to_python(view.dtype)) + " " + view.shape.to_string()});
  }
  args.num_tokens = static_cast<const int64_t*>(view.data);
}

void CallViews::take_workspace(nb::handle object) {
  if (object.is_none()) return;
  const TensorView view = keep(object, "workspace").writable_vector("[bytes]");
  const auto bytes = static_cast<size_t>(view.shape[0] * byte_size(view.dtype));
  workspace = {static_cast<std::byte*>(view.data), bytes};
}

CallViews::CallViews(const CallArrays& call, const ArrayDevice& device, uintptr_t stream)
    : device_(device), stream_(stream) {
  kept_.reserve(16);
  args.hidden = input(call.hidden, "hidden", "[T, hidden_size]");
  args.router_logits = input(call.router_logits, "router_logits", "[T, num_experts]");
  args.topk_ids = input(call.topk_ids, "topk_ids", "[T, top_k]");
  args.topk_weights = input(call.topk_weights, "topk_weights", "[T, top_k]");
  args.router_input = input(call.router_input, "router_input", "[T, hidden_size]");
  args.residual_input = input(call.residual_input, "residual_input", "[T, hidden_size]");
  args.token_ids = input(call.token_ids, "token_ids", "[T]", 1);
  args.padding_mask = input(call.padding_mask, "padding_mask", "[T]", 1);
  take_num_tokens(call.num_tokens);
  args.out = output(call.out, "out", "[T, hidden_size]");
  args.shared_out = output(call.shared_out, "shared_out", "[T, hidden_size]");
  args.captured_logits = output(call.captured_logits, "captured_logits", "[T, num_experts]");
  args.captured_ids = output(call.captured_ids, "captured_ids", "[T, top_k]");
  args.captured_weights = output(call.captured_weights, "captured_weights", "[T, top_k]");
  take_workspace(call.workspace);
  if (device_.is_cuda) args.stream = to_stream(reinterpret_cast<CUstream_st*>(stream));
}

}  // namespace conclave::python
