#include "record/rows.h"

#include "core/checked.h"

#include "conclave/error.h"

#include <algorithm>
#include <numeric>
#include <string>

namespace conclave::inline v0::record {
namespace {

constexpr int64_t kMostLayers = 65536;
constexpr int64_t kMostTokens = int64_t{1} << 40;
constexpr int64_t kMostIds = int64_t{1} << 24;
constexpr int64_t kMostSlots = int64_t{1} << 16;  // times the largest capacity, within 63 bits

void check_number(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "a recorded layer has a number out of range",
               .tensor = field,
               .found = std::to_string(value),
               .limit = std::to_string(low) + " to " + std::to_string(high)});
}

void check_length(const RecordedRows& rows, const char* name, size_t found, size_t expected) {
  if (found == expected) return;
  throw Error(ErrorCode::kShape,
              {.what = "rows of layer " + std::to_string(rows.layer.layer) + " disagree in length",
               .tensor = name,
               .expected = std::to_string(expected) + " elements",
               .found = std::to_string(found)});
}

}  // namespace

void check_layer(const RecordedLayer& layer) {
  check_number("layer", layer.layer, 0, kMostLayers - 1);
  check_number("num_ids", layer.num_ids, 1, kMostIds);
  check_number("num_slots", layer.num_slots, 1, kMostSlots);
}

void check_record(const RoutingRecord& record) {
  int64_t before = -1;
  for (const RecordedRows& rows : record.layers) {
    check_layer(rows.layer);
    check_number("layer", rows.layer.layer, before + 1, kMostLayers - 1);
    before = rows.layer.layer;
    const size_t elements = rows.tokens.size() * static_cast<size_t>(rows.layer.num_slots);
    check_length(rows, "topk_ids", rows.topk_ids.size(), elements);
    check_length(rows, "topk_weights", rows.topk_weights.size(), elements);
  }
}

void check_argument(std::string_view name, const ConstTensorView& tensor, int64_t rows,
                    int64_t slots, std::initializer_list<DType> types) {
  const Shape expected{rows, slots};
  if (tensor.shape != expected) {
    throw Error(ErrorCode::kShape, {.what = "an argument has the wrong shape",
                                    .tensor = std::string(name),
                                    .expected = expected.to_string(),
                                    .found = tensor.shape.to_string()});
  }
  if (std::ranges::find(types, tensor.dtype) == types.end()) {
    throw Error(ErrorCode::kDType, {.what = "an argument has the wrong type",
                                    .tensor = std::string(name),
                                    .expected = std::string(to_string(*types.begin())),
                                    .found = std::string(to_string(tensor.dtype))});
  }
  if (tensor.row_stride != 0 && tensor.row_stride < slots) {
    throw Error(ErrorCode::kStride, {.what = "rows of an argument overlap each other",
                                     .tensor = std::string(name),
                                     .expected = "0 or at least " + std::to_string(slots),
                                     .found = std::to_string(tensor.row_stride)});
  }
  if (rows == 0) return;
  if (tensor.data == nullptr) {
    throw Error(ErrorCode::kNullPointer,
                {.what = "an argument has no data", .tensor = std::string(name)});
  }
  const auto element = byte_size(tensor.dtype);
  const auto elements = checked_mul(rows, std::max(tensor.row_stride, slots));
  if (!elements || !checked_mul(*elements, element)) {
    throw Error(ErrorCode::kStride, {.what = "rows of an argument lie beyond any address",
                                     .tensor = std::string(name),
                                     .expected = "rows x row_stride within 63 bits",
                                     .found = std::to_string(tensor.row_stride)});
  }
  if (reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(element) == 0) return;
  throw Error(ErrorCode::kMisaligned, {.what = "an argument is not aligned to its element",
                                       .tensor = std::string(name),
                                       .expected = "a multiple of " + std::to_string(element)});
}

std::string layers_text(const std::vector<int64_t>& layers) {
  std::string text;
  for (const int64_t layer : layers) text += (text.empty() ? "" : ", ") + std::to_string(layer);
  return text.empty() ? "none" : text;
}

std::vector<RecordedLayer> layers_to_record(std::span<const RecordedLayer> layers,
                                            int64_t capacity) {
  if (capacity < 1 || capacity > kMostTokens) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "the capacity is out of range",
                                              .tensor = "capacity",
                                              .found = std::to_string(capacity),
                                              .limit = "1 to " + std::to_string(kMostTokens)});
  }
  std::vector<RecordedLayer> sorted(layers.begin(), layers.end());
  std::ranges::sort(sorted, {}, &RecordedLayer::layer);
  int64_t before = -1;
  for (const RecordedLayer& layer : sorted) {
    check_layer(layer);
    if (layer.layer == before) {
      throw Error(ErrorCode::kInvalidArgument, {.what = "a layer is to be recorded twice",
                                                .tensor = "layer",
                                                .found = std::to_string(layer.layer)});
    }
    before = layer.layer;
  }
  return sorted;
}

void refuse_layer(int64_t layer, const std::vector<int64_t>& recorded) {
  throw Error(ErrorCode::kInvalidArgument, {.what = "this layer is not recorded",
                                            .tensor = "layer",
                                            .found = std::to_string(layer),
                                            .limit = layers_text(recorded)});
}

TokenIndex::TokenIndex(const RecordedRows& rows) : rows_(&rows), order_(rows.tokens.size()) {
  std::iota(order_.begin(), order_.end(), int64_t{0});
  std::ranges::stable_sort(order_, {},
                           [&rows](int64_t row) { return rows.tokens[static_cast<size_t>(row)]; });
}

int64_t TokenIndex::row_of(const TokenKey& token) const noexcept {
  const auto key = [this](int64_t row) { return rows_->tokens[static_cast<size_t>(row)]; };
  const auto after = std::ranges::upper_bound(order_, token, {}, key);
  if (after == order_.begin() || key(after[-1]) != token) return -1;
  return after[-1];
}

std::vector<TokenKey> TokenIndex::tokens() const {
  std::vector<TokenKey> tokens;
  for (const int64_t row : order_) {
    const TokenKey& token = rows_->tokens[static_cast<size_t>(row)];
    if (tokens.empty() || tokens.back() != token) tokens.push_back(token);
  }
  return tokens;
}

}  // namespace conclave::inline v0::record
