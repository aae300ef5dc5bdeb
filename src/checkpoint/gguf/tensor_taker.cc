#include "checkpoint/gguf/tensor_taker.h"

#include "checkpoint/gguf/row_reader.h"
#include "quant/gguf/block_type.h"
#include "routing/router_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

namespace conclave::inline v0::checkpoint {

std::string size_text(int64_t size) { return size == kUnknownSize ? "?" : std::to_string(size); }

int64_t row_length(const GgufPlace& place) {
  const auto shape = place.tensor->shape();
  return shape.empty() ? 1 : shape.back();
}

int64_t count_rows(const GgufPlace& place) {
  const auto shape = place.tensor->shape();
  if (shape.empty()) return 1;
  return std::accumulate(shape.begin(), shape.end() - 1, int64_t{1},
                         [](int64_t product, int64_t size) { return product * size; });
}

bool may_be_stack(const GgufPlace& place, int64_t count) {
  const auto shape = place.tensor->shape();
  const auto first = std::ranges::find_if(shape, [](int64_t size) { return size != 1; });
  return shape.end() - first < 3 || *first == count;
}

std::string GgufDims::text() const {
  const std::string matrix = fmt::format("{}, {}", size_text(rows), size_text(cols));
  return count == 1 ? fmt::format("[{}]", matrix) : fmt::format("[{}, {}]", count, matrix);
}

GgufTensorTaker::GgufTensorTaker(const GgufTensorTable& tensors, int64_t index, GgufAbsent absent)
    : tensors_(tensors), own_(tensors.layer(index)), may_come_(absent == GgufAbsent::kMayCome) {
  layer_.index = index;
  layer_.prefix = gguf_layer_prefix(index);
}

void GgufTensorTaker::fail(ErrorCode code, const GgufPlace& place, ErrorDetail detail) const {
  detail.file = place.is_in_file() ? place.part->file.name() : tensors_.origin();
  if (place) detail.tensor = place.tensor->name;
  throw Error(code, std::move(detail));
}

std::string_view GgufTensorTaker::rest_of(const GgufPlace& place) const {
  return std::string_view(place.tensor->name).substr(layer_.prefix.size());
}

bool GgufTensorTaker::has_any(const std::function<bool(std::string_view rest)>& wanted) const {
  return std::ranges::any_of(own_, [&](const GgufPlace& place) { return wanted(rest_of(place)); });
}

GgufPlace GgufTensorTaker::peek(std::string_view name) const {
  const auto at =
      std::ranges::lower_bound(own_, name, {}, [&](const GgufPlace& own) { return rest_of(own); });
  return at != own_.end() && rest_of(*at) == name ? *at : GgufPlace();
}

GgufPlace GgufTensorTaker::peek_any(std::initializer_list<std::string_view> names) const {
  for (const std::string_view name : names) {
    if (const GgufPlace place = peek(name)) return place;
  }
  return {};
}

GgufPlace GgufTensorTaker::look_up(std::string_view name) {
  const GgufPlace place = peek(name);
  if (place && used_.insert(place.tensor->name).second) layer_.bytes += place.tensor->bytes;
  return place;
}

GgufPlace GgufTensorTaker::require(std::string_view name, const GgufDims& dims) {
  const GgufPlace place = look_up(name);
  if (place) return place;
  if (may_come_) {
    missing_.push_back({.name = layer_.prefix + std::string(name), .dims = dims.text()});
    return place;
  }
  fail(ErrorCode::kTensorMissing, place,
       {.what = fmt::format("layer {} lacks a tensor of the model", layer_.index),
        .tensor = layer_.prefix + std::string(name)});
}

GgufPlace GgufTensorTaker::look_up(std::string_view name, bool is_demanded, const GgufDims& dims) {
  return is_demanded ? require(name, dims) : look_up(name);
}

void GgufTensorTaker::check_shape(const GgufPlace& place, const GgufDims& dims) const {
  const int64_t rows = count_rows(place);
  const bool has_cols = dims.cols == kUnknownSize || row_length(place) == dims.cols;
  // Divided, since a list of tensors without their data may have any sizes.
  const bool has_rows =
      rows % dims.count == 0 && (dims.rows == kUnknownSize || rows / dims.count == dims.rows);
  const bool has_count = dims.count == 1 || may_be_stack(place, dims.count);
  if (has_cols && has_rows && has_count) return;
  fail(ErrorCode::kTensorShape, place,
       {.what = "the tensor's shape disagrees with the layer's sizes",
        .expected = dims.text(),
        .found = io::describe_tensor(*place.tensor)});
}

void GgufTensorTaker::check_type(WeightId id, const GgufPlace& place) const {
  const io::GgufType& type = *place.tensor->type;
  const std::optional<DType> plain = plain_type(type);
  const bool is_integer = plain == DType::kI32 || plain == DType::kI64;
  const bool is_number = (plain && !is_integer) || quant::find_block_type(type.name) != nullptr;
  const routing::RouterTensor* const own = routing::find_router_tensor(id);
  const bool wants_integers = own != nullptr && own->element == routing::RouterElement::kIndex;
  if (wants_integers ? is_integer : is_number) return;
  fail(ErrorCode::kTensorDType, place,
       {.what = "the tensor has a type that it cannot have",
        .expected = wants_integers ? "I32 or I64" : "F32, F16, BF16 or blocks",
        .found = std::string(type.name)});
}

void GgufTensorTaker::store(WeightId id, const GgufPlace& place, const GgufDims& dims,
                            int64_t first_row, int64_t stride) {
  check_type(id, place);
  GgufStored& stored = layer_.stored[id];
  stored.rows = dims.rows;
  stored.cols = dims.cols;
  for (int64_t i = 0; i < dims.count; ++i) {
    stored.matrices.push_back({place, first_row + i * stride});
  }
}

void GgufTensorTaker::take(WeightId id, const GgufPlace& place, const GgufDims& dims) {
  if (!place) return;
  check_shape(place, dims);
  store(id, place, dims, 0, dims.rows);
}

void GgufTensorTaker::take_required(WeightId id, std::string_view name, const GgufDims& dims) {
  take(id, require(name, dims), dims);
}

void GgufTensorTaker::take_optional(WeightId id, std::string_view name, const GgufDims& dims,
                                    bool is_demanded) {
  take(id, look_up(name, is_demanded, dims), dims);
}

void GgufTensorTaker::check_all_used() const {
  for (const GgufPlace& place : own_) {
    if (used_.contains(place.tensor->name) || !belongs_to_experts(rest_of(place))) continue;
    fail(ErrorCode::kTensorUnexpected, place,
         {.what = "the layer has no use for this tensor of its experts",
          .found = io::describe_tensor(*place.tensor)});
  }
}

GgufLayerSoFar GgufTensorTaker::take_so_far() {
  return {.used = std::move(used_), .missing = std::move(missing_)};
}

}  // namespace conclave::inline v0::checkpoint
