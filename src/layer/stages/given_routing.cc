#include "layer/stages/given_routing.h"

#include "layer/arguments.h"

namespace conclave::inline v0 {

void load_given_ids(const MoeSpec& spec, const ConstTensorView& given, int32_t* ids,
                    KernelCounts& counts) {
  const int64_t top_k = spec.top_k;
  for (int64_t token = 0; token < given.shape[0]; ++token) {
    for (int64_t slot = 0; slot < top_k; ++slot) {
      // Ids are compared in 64 bits: an int64 id must not become valid by truncation.
      const int64_t id = load_id(given, token, slot);
      const bool valid = is_slot_id(spec, slot, id);
      if (!valid && id != -1) ++counts.skipped_ids;
      ids[token * top_k + slot] = valid ? static_cast<int32_t>(id) : -1;
    }
  }
}

void load_given_weights(const ConstTensorView& given, int64_t first, int64_t slots,
                        float* weights) {
  ConstTensorView columns = given;
  columns.data = static_cast<const std::byte*>(given.data) + first * byte_size(given.dtype);
  columns.shape = {given.shape[0], slots};
  convert(columns, {.data = weights, .dtype = DType::kF32, .shape = columns.shape});
}

void drop_unused_slots(const MoeSpec& spec, const ConstTensorView& given, float* shared_weights,
                       KernelCounts& counts) {
  const int64_t num_shared = spec.shared.count;
  for (int64_t token = 0; token < given.shape[0]; ++token) {
    for (int64_t i = 0; i < num_shared; ++i) {
      const int64_t id = load_id(given, token, spec.top_k + i);
      if (is_slot_id(spec, spec.top_k + i, id)) continue;
      if (id != -1) ++counts.skipped_ids;
      shared_weights[token * num_shared + i] = 0;
    }
  }
}

void load_token_ids(const ConstTensorView& given, const Padding& padding, int32_t* token_ids) {
  for (int64_t token = 0; token < given.shape[0]; ++token) {
    token_ids[token] =
        padding.is_token(token) ? static_cast<int32_t>(load_token_id(given, token)) : 0;
  }
}

}  // namespace conclave::inline v0
