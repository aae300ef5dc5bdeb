// Converts the arguments of a forward from Python objects to the library's views.
#pragma once

#include "arrays.h"
#include "call_arguments.h"

#include "conclave/layer.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace conclave::python {

// The arguments of a call, in the order of kCallArguments; None if it has no such argument.
using CallObjects = std::array<nb::handle, kCallArguments.size()>;

// The tensors of a call as the library takes them, kept alive until the call is over.
class CallViews {
 public:
  // Throws Error naming the argument. `device` must outlive this.
  CallViews(const CallObjects& call, const ArrayDevice& device, uintptr_t stream);
  CallViews(const CallViews&) = delete;
  CallViews& operator=(const CallViews&) = delete;

  ForwardArgs args;
  std::span<std::byte> workspace;  // empty if none is given

 private:
  void take(nb::handle object, const CallArgument& argument);
  static int64_t limit_of(nb::handle object, const CallArgument& argument);
  void take_adapter(nb::handle object, const CallArgument& argument);
  void take_count(nb::handle object, const CallArgument& argument);
  void take_rank_counts(nb::handle object, const CallArgument& argument);
  const Array& keep(nb::handle object, const CallArgument& argument);

  const ArrayDevice& device_;
  uintptr_t stream_;
  std::vector<Array> kept_;
  int64_t num_tokens_ = 0;
  std::vector<int64_t> rank_tokens_;
};

}  // namespace conclave::python
