#include "layer/cuda/scale_rows.h"

#include "core/row_stride.h"
#include "experts/cuda/scale_bytes.h"
#include "quant/code_meaning.h"
#include "quant/planes.h"
#include "quant/scale_type.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace conclave::inline v0 {
namespace {

[[noreturn]] void refuse(const WeightSource& source, WeightId id, int64_t expert, DType type,
                         float scale) {
  throw Error(ErrorCode::kTensorValue,
              {.what = "a scale is none that the layer holds",
               .tensor = source.locate(id, expert),
               .expected = fmt::format("a number that {} has", conclave::to_string(type)),
               .found = fmt::format("{}", scale),
               .hint = "a layer holds any if it is made with ScaleValues::kFloat of a source of "
                       "float32 scales"});
}

}  // namespace

ScaleRows::ScaleRows(const QuantSpec& quant, const WeightUpload& upload)
    : local_(quant), upload_(upload), loader_(upload.on_host()) {
  local_.has_global_scale = false;
}

void ScaleRows::load(WeightId matrix, int64_t expert, const WeightBlock& block) {
  if (!load_bytes(matrix, expert, block)) load_numbers(matrix, expert, block);
}

// Returns false if the source has another type, or bytes that load_numbers refuses or has others
// for: those of no number and those with a sign are larger than any other.
bool ScaleRows::load_bytes(WeightId matrix, int64_t expert, const WeightBlock& block) {
  const WeightSource& source = upload_.on_host();
  const WeightId id = matrix.with(WeightPlane::kScale);
  const DType type = quant::type_of_scales(local_.scale_values);
  const WeightInfo info = source.describe(matrix);
  const quant::PlaneShape plane =
      quant::plane_of(WeightPlane::kScale, info.dtype, local_, info.rows, info.cols);
  if (source.describe(id).dtype != type || plane.block_rows != 1) return false;
  const BlockRequest request{.id = id, .expert = expert, .block = quant::slice(plane, block).block};
  ConstTensorView view;
  loader_.load({&request, 1}, {&view, 1});
  bytes_ = static_cast<const std::byte*>(view.data);
  rows_ = view.shape[0];
  stride_ = row_stride(view);
  find_range(view.shape[1]);
  return most_ <= byte_of(quant::largest_scale(type));
}

void ScaleRows::load_numbers(WeightId matrix, int64_t expert, const WeightBlock& block) {
  const WeightSource& source = upload_.on_host();
  made_.clear();
  rows_ = block.row_end - block.row_begin;
  stride_ = 0;
  const int64_t rows_at_once = upload_.scale_rows(rows_);
  WeightBlock part = block;
  for (; part.row_begin < block.row_end; part.row_begin = part.row_end) {
    part.row_end = std::min(part.row_begin + rows_at_once, block.row_end);
    const CodeMeaning meaning = load_meaning(local_, source, matrix, expert, part);
    stride_ = meaning.groups;
    for (const float scale : meaning.scales) {
      if (!experts::has_scale(local_.scale_values, scale)) {
        refuse(source, matrix.with(WeightPlane::kScale), expert,
               quant::type_of_scales(local_.scale_values), scale);
      }
      made_.push_back(static_cast<std::byte>(byte_of(scale)));
    }
  }
  bytes_ = made_.data();
  find_range(stride_);
}

uint8_t ScaleRows::byte_of(float scale) const {
  return experts::ScaleBytes(local_.scale_values, experts::ByteForm::kAsStored, {}).of(scale);
}

void ScaleRows::find_range(int64_t groups) {
  uint8_t least = std::numeric_limits<uint8_t>::max();
  uint8_t most = 0;
  for (int64_t i = 0; i < rows_; ++i) {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(row(i));
    for (int64_t group = 0; group < groups; ++group) {
      least = std::min(least, bytes[group]);
      most = std::max(most, bytes[group]);
    }
  }
  least_ = least;
  most_ = most;
}

}  // namespace conclave::inline v0
