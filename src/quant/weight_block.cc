#include "quant/weight_block.h"

#include "core/checked.h"
#include "core/row_stride.h"
#include "core/weight_types.h"

#include <algorithm>
#include <cstddef>

namespace conclave::inline v0 {
namespace {

// Copies begin at multiples of a whole vector.
constexpr int64_t kCopyAlignment = 64;

Shape shape_of(const WeightBlock& block) {
  return {block.row_end - block.row_begin, block.col_end - block.col_begin};
}

size_t bytes_of(DType dtype, const WeightBlock& block) {
  return static_cast<size_t>((block.row_end - block.row_begin) *
                             packed_bytes(dtype, block.col_end - block.col_begin));
}

}  // namespace

ConstTensorView block_of_view(const ConstTensorView& whole, const WeightBlock& block) {
  const int64_t stride = row_stride(whole);
  const int64_t first = block.row_begin * packed_bytes(whole.dtype, stride) +
                        packed_bytes(whole.dtype, block.col_begin);
  return {.data = static_cast<const std::byte*>(whole.data) + first,
          .dtype = whole.dtype,
          .shape = shape_of(block),
          .row_stride = stride};
}

bool begins_bytes(const ConstTensorView& whole, const WeightBlock& block) {
  const int64_t bits = bit_size(whole.dtype);
  const int64_t stride = row_stride(whole);
  return stride * bits % 8 == 0 && block.col_begin * bits % 8 == 0;
}

void BlockLoader::load(std::span<const BlockRequest> requests, std::span<ConstTensorView> views) {
  release();
  // The first pass sizes the copies, so that memory is allocated once.
  int64_t copied_bytes = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    const BlockRequest& request = requests[i];
    views[i] = {};
    if (!request.wanted) continue;
    const ConstTensorView whole = source_.view(request.id, request.expert);
    if (!whole.empty() && begins_bytes(whole, request.block)) {
      views[i] = block_of_view(whole, request.block);
      in_place_.push_back(request);
      continue;
    }
    const DType dtype = source_.describe(request.id).dtype;
    const int64_t cols = request.block.col_end - request.block.col_begin;
    const int64_t codes_per_byte = std::max<int64_t>(1, 8 / bit_size(dtype));
    views[i] = {.dtype = dtype,
                .shape = shape_of(request.block),
                .row_stride = round_up(cols, codes_per_byte)};
    const auto bytes = static_cast<int64_t>(bytes_of(dtype, request.block));
    copied_bytes += round_up(bytes, kCopyAlignment);
  }
  if (static_cast<int64_t>(memory_.size_bytes()) < copied_bytes) {
    memory_ = Tensor();
    memory_ = Tensor(DType::kU8, {copied_bytes});
  }
  std::byte* next = memory_.as<std::byte>();
  for (size_t i = 0; i < requests.size(); ++i) {
    if (!requests[i].wanted || !views[i].empty()) continue;
    const size_t bytes = bytes_of(views[i].dtype, requests[i].block);
    if (bytes == 0) continue;
    source_.read(requests[i].id, requests[i].expert, requests[i].block, {next, bytes});
    views[i].data = next;
    next += round_up(static_cast<int64_t>(bytes), kCopyAlignment);
  }
}

void BlockLoader::release() {
  for (const BlockRequest& request : in_place_) {
    source_.release(request.id, request.expert, request.block);
  }
  in_place_.clear();
}

ConstTensorView BlockLoader::load(WeightId id, int64_t expert) {
  const WeightInfo info = source_.describe(id);
  const BlockRequest request{.id = id, .expert = expert, .block = {0, info.rows, 0, info.cols}};
  ConstTensorView view;
  load({&request, 1}, {&view, 1});
  return view;
}

std::vector<float> load_vector(const WeightSource& source, WeightId id) {
  BlockLoader loader(source);
  const ConstTensorView vector = loader.load(id, 0);
  std::vector<float> values(static_cast<size_t>(vector.shape[0] * vector.shape[1]));
  convert(vector, {.data = values.data(), .dtype = DType::kF32, .shape = vector.shape});
  return values;
}

}  // namespace conclave::inline v0
