// Calls that one launch serves, and rows of larger ones.
#pragma once

#include "conclave/context.h"
#include "conclave/layer.h"
#include "conclave/tensor.h"
#include "conclave/tuning.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

namespace conclave::testing {

// Has the single launch serve all calls that it can.
inline std::shared_ptr<TuningTable> one_launch_table(const MoeSpec& spec) {
  const Context context({.device = "cuda:0", .num_threads = 1});
  auto table = std::make_shared<TuningTable>();
  for (int64_t tokens = 1; tokens <= 8; ++tokens) {
    for (const TuningEntry& entry :
         tuning_candidates(context, spec, {.max_tokens = 8}, {}, tokens)) {
      if (entry.kernel == "cuda.decode_sm90") table->set(entry);
    }
  }
  return table;
}

inline Tensor copy_rows(const Tensor& all, int64_t begin, int64_t count) {
  const ConstTensorView from = all.const_view();
  Tensor rows(from.dtype, {count, from.shape[1]});
  const auto pitch = static_cast<size_t>(byte_size(from.dtype) * from.shape[1]);
  std::memcpy(rows.as<std::byte>(),
              static_cast<const std::byte*>(from.data) + static_cast<size_t>(begin) * pitch,
              static_cast<size_t>(count) * pitch);
  return rows;
}

}  // namespace conclave::testing
