#include "permute.h"

#include "arrays.h"

#include "conclave/error.h"
#include "conclave/permute.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace conclave::python {
namespace {

void require_size(const Array& array, int64_t at_least) {
  const int64_t size = array.rank() == 1 ? array.shape()[0] : -1;
  if (size >= at_least) return;
  throw Error(ErrorCode::kShape, {.what = "an argument that is written is too small",
                                  .tensor = array.name(),
                                  .expected = "at least " + std::to_string(at_least),
                                  .found = array.shape_text()});
}

template <class T>
T* output(const Array& array, int64_t size, DType dtype) {
  const TensorView view = array.writable_vector("[n]");
  require_size(array, size);
  if (view.dtype == dtype) return static_cast<T*>(view.data);
  throw Error(ErrorCode::kDType, {.what = "an argument has the wrong type",
                                  .tensor = array.name(),
                                  .expected = std::string(dtype_to_python(dtype)),
                                  .found = std::string(dtype_to_python(view.dtype))});
}

// Returns num_tokens_post_padded; the rest of both outputs is filled with T * top_k (no slot) and
// -1 (no expert). With `keeps_others`, slots of experts without a local index stay, in blocks of
// expert -1.
int64_t align(nb::handle topk_ids, int64_t block_size, int64_t num_experts,
              const std::vector<int32_t>& local_of, bool keeps_others, nb::handle sorted_ids,
              nb::handle expert_ids) {
  const Array ids(topk_ids, "topk_ids");
  const Array slots(sorted_ids, "sorted_token_ids");
  const Array experts(expert_ids, "expert_ids");
  for (const Array* array : {&ids, &slots, &experts}) array->require_device({});
  const ConstTensorView view = ids.matrix("[T, top_k]");
  const nb::gil_scoped_release released;
  const std::span<const int32_t> none;
  const BlockAlignment aligned =
      align_block_size(view, block_size,
                       {.num_experts = num_experts,
                        .local_of = keeps_others ? none : std::span<const int32_t>(local_of)});
  auto* slot_of = output<int32_t>(slots, aligned.num_padded, DType::kI32);
  auto* expert_of =
      output<int32_t>(experts, static_cast<int64_t>(aligned.expert_of_block.size()), DType::kI32);
  std::fill_n(slot_of, slots.shape()[0], static_cast<int32_t>(view.shape[0] * view.shape[1]));
  std::fill_n(expert_of, experts.shape()[0], -1);
  std::copy(aligned.slots.begin(), aligned.slots.end(), slot_of);
  const bool renumbers = keeps_others && !local_of.empty();
  for (size_t block = 0; block < aligned.expert_of_block.size(); ++block) {
    const int32_t expert = aligned.expert_of_block[block];
    expert_of[block] = renumbers ? local_of.at(static_cast<size_t>(expert)) : expert;
  }
  return aligned.num_padded;
}

// Returns the number of rows with a local expert; the rows behind them are zero and belong to the
// slots without one, in slot order.
int64_t permute(nb::handle hidden, nb::handle topk_ids, int64_t num_experts,
                const std::vector<int32_t>& local_of, nb::handle rows_out, nb::handle first_row,
                nb::handle slot_of_row, nb::handle row_of_slot) {
  const Array hidden_array(hidden, "hidden_states");
  const Array ids(topk_ids, "topk_ids");
  const Array rows(rows_out, "permuted_hidden_states");
  const Array firsts(first_row, "expert_first_token_offset");
  const Array slots(slot_of_row, "permuted_idx");
  const Array inverse(row_of_slot, "inv_permuted_idx");
  for (const Array* array : {&hidden_array, &ids, &rows, &firsts, &slots, &inverse}) {
    array->require_device({});
  }
  const ConstTensorView in = hidden_array.matrix("[T, hidden_size]");
  const ConstTensorView id_view = ids.matrix("[T, top_k]");
  const TensorView out = rows.writable_matrix("[T * top_k, hidden_size]");
  const nb::gil_scoped_release released;
  const PermutedRows permuted =
      permute_rows(in, id_view, {.num_experts = num_experts, .local_of = local_of});
  const int64_t count = permuted.rows.shape()[0];
  const int64_t width = in.shape[1];
  if (out.shape[0] < count || out.shape[1] != width || out.dtype != in.dtype ||
      out.row_stride != 0) {
    throw Error(ErrorCode::kShape,
                {.what = "the rows have no place",
                 .tensor = "permuted_hidden_states",
                 .expected = "dense, as hidden_states, " + std::to_string(count) + " rows or more",
                 .found = rows.shape_text()});
  }
  auto* first =
      output<int64_t>(firsts, static_cast<int64_t>(permuted.expert_first_row.size()), DType::kI64);
  const int64_t num_slots = static_cast<int64_t>(permuted.row_of_slot.size());
  auto* slot = output<int32_t>(slots, num_slots, DType::kI32);
  auto* row = output<int32_t>(inverse, num_slots, DType::kI32);
  const size_t bytes = permuted.rows.size_bytes();
  if (bytes > 0) std::memcpy(out.data, permuted.rows.view().data, bytes);
  const size_t all = dense_bytes(out.dtype, out.shape);
  if (all > bytes) std::memset(static_cast<std::byte*>(out.data) + bytes, 0, all - bytes);
  std::copy(permuted.expert_first_row.begin(), permuted.expert_first_row.end(), first);
  std::fill_n(slot, num_slots, static_cast<int32_t>(num_slots));
  for (int64_t i = 0; i < count; ++i) {
    slot[i] = static_cast<int32_t>(permuted.slot_of_row[static_cast<size_t>(i)]);
  }
  int64_t behind = count;
  for (int64_t i = 0; i < num_slots; ++i) {
    const int64_t at = permuted.row_of_slot[static_cast<size_t>(i)];
    row[i] = static_cast<int32_t>(at >= 0 ? at : behind++);
  }
  return count;
}

// Rows from `num_rows` on belong to no local expert.
void unpermute(nb::handle rows_in, nb::handle row_of_slot, nb::handle topk_weights,
               nb::handle out_rows, int64_t num_rows) {
  const Array rows(rows_in, "permuted_hidden_states");
  const Array inverse(row_of_slot, "inv_permuted_idx");
  const Array weights(topk_weights, "topk_weights");
  const Array out(out_rows, "out");
  for (const Array* array : {&rows, &inverse, &weights, &out}) array->require_device({});
  const ConstTensorView in = rows.matrix("[N, hidden_size]");
  const ConstTensorView index = inverse.vector("[T * top_k]");
  const ConstTensorView weight = weights.matrix("[T, top_k]");
  const TensorView to = out.writable_matrix("[T, hidden_size]");
  if (index.dtype != DType::kI32) {
    throw Error(ErrorCode::kDType, {.what = "an argument has the wrong type",
                                    .tensor = inverse.name(),
                                    .expected = "int32",
                                    .found = std::string(dtype_to_python(index.dtype))});
  }
  const nb::gil_scoped_release released;
  const auto* found = static_cast<const int32_t*>(index.data);
  std::vector<int64_t> row(static_cast<size_t>(index.shape[0]));
  for (size_t slot = 0; slot < row.size(); ++slot) {
    row[slot] = found[slot] < num_rows ? found[slot] : -1;
  }
  unpermute_rows(in, row, weight, to);
}

}  // namespace

void bind_permute(nb::module_& module) {
  module.def("align_block_size", &align, nb::arg("topk_ids"), nb::arg("block_size"),
             nb::arg("num_experts"), nb::arg("local_of"), nb::arg("keeps_others"),
             nb::arg("sorted_token_ids"), nb::arg("expert_ids"),
             "See conclave.moe_align_block_size.");
  module.def("permute", &permute, nb::arg("hidden_states"), nb::arg("topk_ids"),
             nb::arg("num_experts"), nb::arg("local_of"), nb::arg("permuted_hidden_states"),
             nb::arg("expert_first_token_offset"), nb::arg("permuted_idx"),
             nb::arg("inv_permuted_idx"), "See conclave.moe_permute.");
  module.def("unpermute", &unpermute, nb::arg("permuted_hidden_states"),
             nb::arg("inv_permuted_idx"), nb::arg("topk_weights"), nb::arg("out"),
             nb::arg("num_rows"), "See conclave.moe_unpermute.");
}

}  // namespace conclave::python
