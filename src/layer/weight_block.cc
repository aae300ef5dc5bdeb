#include "layer/weight_block.h"

#include <cstddef>

namespace conclave::inline v0 {

LoadedBlock::LoadedBlock(const WeightSource& source, WeightRole role, int64_t expert,
                         const WeightBlock& block) {
  const Shape shape{block.row_end - block.row_begin, block.col_end - block.col_begin};
  const ConstTensorView whole = source.view(role, expert);
  if (!whole.empty()) {
    const int64_t stride = whole.row_stride != 0 ? whole.row_stride : whole.shape[1];
    const int64_t first = block.row_begin * stride + block.col_begin;
    view_ = {.data = static_cast<const std::byte*>(whole.data) + first * byte_size(whole.dtype),
             .dtype = whole.dtype,
             .shape = shape,
             .row_stride = stride};
    return;
  }
  copy_ = Tensor(source.describe(role).dtype, shape);
  if (copy_.size_bytes() != 0) {
    source.read(role, expert, block, {copy_.as<std::byte>(), copy_.size_bytes()});
  }
  view_ = copy_.const_view();
}

WeightBlock whole_block(const WeightInfo& info) {
  return {.row_begin = 0, .row_end = info.rows, .col_begin = 0, .col_end = info.cols};
}

std::vector<float> load_vector(const WeightSource& source, WeightRole role) {
  const WeightInfo info = source.describe(role);
  const LoadedBlock block(source, role, 0, whole_block(info));
  std::vector<float> values(static_cast<size_t>(info.rows * info.cols));
  convert(block.view(),
          {.data = values.data(), .dtype = DType::kF32, .shape = {info.rows, info.cols}});
  return values;
}

}  // namespace conclave::inline v0
