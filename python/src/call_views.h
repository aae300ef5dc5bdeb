// Converts the arguments of a forward from Python objects to the library's views.
#pragma once

#include "arrays.h"

#include "conclave/layer.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace conclave::python {

// The tensors of a call; None if it has no such tensor.
struct CallArrays {
  nb::handle hidden, out, router_logits, topk_ids, topk_weights, router_input, residual_input,
      token_ids, padding_mask, num_tokens, shared_out, captured_logits, captured_ids,
      captured_weights, workspace;
};

// The tensors of a call as the library takes them, kept alive until the call is over.
class CallViews {
 public:
  // Throws Error naming the argument. `device` must outlive this.
  CallViews(const CallArrays& call, const ArrayDevice& device, uintptr_t stream);
  CallViews(const CallViews&) = delete;
  CallViews& operator=(const CallViews&) = delete;

  ForwardArgs args;
  std::span<std::byte> workspace;  // empty if none is given

 private:
  ConstTensorView input(nb::handle object, const char* name, const char* shape, int rank = 2);
  TensorView output(nb::handle object, const char* name, const char* shape);
  const Array& keep(nb::handle object, const char* name);
  void take_num_tokens(nb::handle object);
  void take_workspace(nb::handle object);

  const ArrayDevice& device_;
  uintptr_t stream_;
  std::vector<Array> kept_;
  int64_t num_tokens_ = 0;
};

}  // namespace conclave::python
