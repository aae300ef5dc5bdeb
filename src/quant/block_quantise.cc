#include "quant/gguf/block_encoder.h"
#include "quant/gguf/block_type.h"
#include "quant/search_shares.h"

#include "conclave/quantise.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace conclave::inline v0 {
namespace {

// A scale that is a power of two cuts values off unless the range is that much wider.
constexpr float kWiderShare = 4.0F / 3.0F;

// |quotient - code| over the distance of the next code on the quotient's side.
double steps_of(std::span<const int8_t> grid, double quotient, int code) {
  const double off = quotient - code;
  if (grid.empty() || off == 0) return std::abs(off);
  const auto here = std::ranges::lower_bound(grid, code);
  const bool at_end = off > 0 ? here + 1 == grid.end() : here == grid.begin();
  const bool above = (off > 0) != at_end;
  const int gap = above ? *(here + 1) - *here : *here - *(here - 1);
  return std::abs(off) / gap;
}

}  // namespace

struct BlockQuantiser::Impl {
  const quant::BlockEncoder& encoder;
  const quant::BlockType& type;
  ScaleRule rule;

  QuantiseError error_of(const float* values, const std::byte* block) const {
    quant::BlockParts parts;
    type.take_apart(block, parts);
    QuantiseError error;
    for (int64_t i = 0; i < type.elements; ++i) {
      const int64_t group = i / type.group;
      const double value = values[i];
      const double scale = parts.scales[group];
      const double offset = type.has_offset ? double{parts.offsets[group]} : 0.0;
      const double off = value - (scale * parts.codes[i] - offset);
      error.squared_error += off * off;
      error.squared_values += value * value;
      if (scale == 0) continue;
      error.worst_steps = std::max(
          error.worst_steps, steps_of(encoder.grid, (value + offset) / scale, parts.codes[i]));
    }
    return error;
  }

  // Writes the block and returns its error.
  QuantiseError encode(const float* values, std::byte* block) const {
    encoder.encode(values, 1, block);
    QuantiseError best = error_of(values, block);
    if (rule == ScaleRule::kAmax) return best;
    std::array<std::byte, quant::kMaxBlockElements> attempt{};
    const auto try_other = [&](const auto& encode_other) {
      encode_other(attempt.data());
      const QuantiseError error = error_of(values, attempt.data());
      if (error.squared_error >= best.squared_error) return;
      best = error;
      std::copy_n(attempt.data(), type.bytes, block);
    };
    const auto try_share = [&](float share) {
      try_other([&](std::byte* other) { encoder.encode(values, share, other); });
    };
    if (encoder.search != nullptr) {
      try_other([&](std::byte* other) { encoder.search(values, other); });
      return best;
    }
    try_share(kWiderShare);
    for (const float share : quant::kShares) try_share(share);
    return best;
  }
};

std::vector<std::string_view> BlockQuantiser::types() {
  std::vector<std::string_view> names;
  for (const quant::BlockEncoder& encoder : quant::block_encoders()) names.push_back(encoder.type);
  return names;
}

BlockQuantiser::BlockQuantiser(std::string_view type, ScaleRule rule) {
  const quant::BlockEncoder* const encoder = quant::find_block_encoder(type);
  if (encoder == nullptr) {
    throw Error(ErrorCode::kUnknownName,
                {.what = "no blocks of this type are made of values",
                 .expected = fmt::format("one of {}", fmt::join(types(), ", ")),
                 .found = std::string(type)});
  }
  impl_ = std::make_unique<const Impl>(Impl{*encoder, *quant::find_block_type(type), rule});
}
BlockQuantiser::BlockQuantiser(BlockQuantiser&&) noexcept = default;
BlockQuantiser::~BlockQuantiser() = default;

int64_t BlockQuantiser::block_elements() const { return impl_->type.elements; }

QuantisedRows BlockQuantiser::quantise(std::span<const float> values, int64_t rows,
                                       int64_t cols) const {
  const quant::BlockType& type = impl_->type;
  if (cols % type.elements != 0) {
    throw Error(ErrorCode::kTensorShape,
                {.what = fmt::format("a row does not hold whole blocks of {}", type.name),
                 .expected = fmt::format("a multiple of {} columns", type.elements),
                 .found = std::to_string(cols)});
  }
  const int64_t blocks = rows * (cols / type.elements);
  QuantisedRows result;
  result.codes.resize(static_cast<size_t>(blocks * type.bytes));
  for (int64_t block = 0; block < blocks; ++block) {
    result.error.add(impl_->encode(values.data() + block * type.elements,
                                   result.codes.data() + block * type.bytes));
  }
  return result;
}

}  // namespace conclave::inline v0
