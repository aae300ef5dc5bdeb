// Sources with scales in bytes, as if these were float32.
#pragma once

#include "core/float8.h"

#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace conclave::testing {

// Scales that a source has in bytes, as float32 numbers, which promise nothing.
class FloatScales final : public WeightSource {
 public:
  explicit FloatScales(std::unique_ptr<WeightSource> inner) : inner_(std::move(inner)) {}

  WeightInfo describe(WeightId id) const override {
    WeightInfo info = inner_->describe(id);
    if (is_widened(id)) info.dtype = DType::kF32;
    return info;
  }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    if (!is_widened(id)) return inner_->read(id, expert, block, destination);
    std::vector<std::byte> bytes(destination.size() / sizeof(float));
    inner_->read(id, expert, block, bytes);
    for (size_t i = 0; i < bytes.size(); ++i) {
      const float scale = e8m0_to_float(static_cast<uint8_t>(bytes[i]));
      std::memcpy(destination.data() + i * sizeof(float), &scale, sizeof(float));
    }
  }

 private:
  bool is_widened(WeightId id) const { return inner_->describe(id).dtype == DType::kF8E8M0; }

  std::unique_ptr<WeightSource> inner_;
};

}  // namespace conclave::testing
