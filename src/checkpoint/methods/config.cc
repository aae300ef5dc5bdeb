#include "checkpoint/methods/config.h"

#include "io/text.h"
#include "quant/weight_format.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <charconv>
#include <vector>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr int64_t kMaxBlock = int64_t{1} << 20;

}  // namespace

std::string text_of(const io::JsonValue& object, std::string_view key, std::string_view otherwise) {
  const auto value = object.find_set(key);
  return std::string(value ? value->as_string() : otherwise);
}

bool flag_of(const io::JsonValue& object, std::string_view key, bool otherwise) {
  const auto value = object.find_set(key);
  return value ? value->as_bool() : otherwise;
}

int64_t block_size(const io::JsonValue& value) { return checked_block(value, value.as_int64()); }

int64_t checked_block(const io::JsonValue& value, int64_t size) {
  if (size >= 1 && size <= kMaxBlock) return size;
  value.reject(ErrorCode::kConfigValue, "a block size is out of range",
               fmt::format("1 to {}", kMaxBlock));
}

void set_block(QuantSpec& spec, int64_t rows, int64_t cols) {
  spec.weights = WeightScale::kBlock;
  spec.block_rows = rows;
  spec.block_cols = cols;
}

void set_block(const io::JsonValue& sizes, QuantSpec& spec) {
  if (sizes.size() != 2) {
    sizes.reject(ErrorCode::kConfigValue, "a block has two sizes", "[rows, columns]");
  }
  std::vector<int64_t> read;
  for (const io::JsonValue& size : sizes.items()) read.push_back(block_size(size));
  set_block(spec, read[0], read[1]);
}

void set_block_text(const io::JsonValue& value, QuantSpec& spec) {
  const std::string_view text = value.as_string();
  int64_t rows = 0;
  int64_t cols = 0;
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, rows);
  const bool parts = first.ec == std::errc() && first.ptr != end && *first.ptr == 'x';
  const auto second = parts ? std::from_chars(first.ptr + 1, end, cols) : first;
  const auto in_range = [](int64_t size) { return size >= 1 && size <= kMaxBlock; };
  if (!parts || second.ec != std::errc() || second.ptr != end || !in_range(rows) ||
      !in_range(cols)) {
    value.reject(ErrorCode::kConfigValue, "a block size has no meaning", "\"128x128\"");
  }
  set_block(spec, rows, cols);
}

void set_group(const io::JsonValue& size, QuantSpec& spec) {
  set_group(size, size.as_int64(), spec);
}

void set_group(const io::JsonValue& value, int64_t size, QuantSpec& spec) {
  if (size == -1) {
    spec.weights = WeightScale::kChannel;
    return;
  }
  set_block(spec, 1, checked_block(value, size));
}

GroupKey key_of(const io::JsonValue& value) { return {.file = value.file(), .path = value.path()}; }

void set_dynamic_rows(QuantSpec& spec) {
  if (spec.weights != WeightScale::kBlock) {
    spec.activations = ActivationScale::kToken;
    return;
  }
  spec.activation_group = spec.block_cols;
  spec.activations = ActivationScale::kGroup;
}

void set_scaled_rows(DType rows, int64_t group, RowScaleRule rule, QuantizedWeights& weights) {
  QuantSpec& spec = weights.spec;
  spec.activations = ActivationScale::kGroup;
  spec.activation_group = group;
  spec.activation_scale_rule = rule;
  if (rows != quant::format_of(weights.element).row_codes->element) spec.activation_dtype = rows;
}

void refuse_layout(std::string_view layout, std::string_view kernel_order) {
  throw NotRead{.reason = "the layout " + io::show_name(layout) + " of its kernels",
                .kernel_order = std::string(kernel_order.empty() ? layout : kernel_order)};
}

QuantizedWeights usual_codes(DType element, const QuantSpec& spec) {
  return {.element = element, .spec = spec};
}

}  // namespace conclave::inline v0::checkpoint
