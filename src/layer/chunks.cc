#include "layer/chunks.h"

#include "layer/call_tensors.h"

#include "conclave/dtype.h"
#include "conclave/tensor.h"

namespace conclave::inline v0 {
namespace {

// The rows of a matrix [T, n] or of a vector [T]; an argument that was not given stays empty.
ConstTensorView rows_of(const ConstTensorView& view, const TokenChunk& chunk) {
  if (view.empty()) return view;
  const bool is_matrix = view.shape.rank() == 2;
  const int64_t columns = is_matrix ? view.shape[1] : 1;
  const int64_t stride = view.row_stride != 0 ? view.row_stride : columns;
  return {.data = static_cast<const std::byte*>(view.data) +
                  chunk.begin * stride * byte_size(view.dtype),
          .dtype = view.dtype,
          .shape = is_matrix ? Shape{chunk.count, columns} : Shape{chunk.count},
          .row_stride = is_matrix ? stride : 0};
}

TensorView rows_of(const TensorView& view, const TokenChunk& chunk) {
  const ConstTensorView rows = rows_of(ConstTensorView(view), chunk);
  return {.data = const_cast<void*>(rows.data),
          .dtype = rows.dtype,
          .shape = rows.shape,
          .row_stride = rows.row_stride};
}

}  // namespace

ForwardArgs chunk_of(const ForwardArgs& args, const TokenChunk& chunk) {
  ForwardArgs part = args;
  for (const CallInput& input : kCallInputs) {
    if (!input.has_rows && (args.*input.view).shape.rank() == 1) continue;
    part.*input.view = rows_of(args.*input.view, chunk);
  }
  for (const CallOutput& output : kCallOutputs) {
    part.*output.view = rows_of(args.*output.view, chunk);
  }
  return part;
}

}  // namespace conclave::inline v0
