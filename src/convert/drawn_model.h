// A directory whose files declare tensors, and whose values an application makes.
#pragma once

#include "convert/safetensors_model.h"

#include "conclave/convert.h"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

namespace conclave::inline v0::conversion {

class DrawnModel final : public SafetensorsModel {
 public:
  // The values must outlive it.
  DrawnModel(const std::filesystem::path& directory, const ModelValues& values)
      : SafetensorsModel(directory), values_(values) {}

  std::unique_ptr<WeightSource> layer_source(int64_t layer) const override {
    return values_.layer_source(layer);
  }
  void read(const SourceTensor& tensor, uint64_t offset,
            std::span<std::byte> destination) const override {
    values_.read(tensor.name, offset, destination);
  }

 private:
  const ModelValues& values_;
};

}  // namespace conclave::inline v0::conversion
