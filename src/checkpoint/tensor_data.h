// The bytes of tensors, in files or in memory.
#pragma once

#include "checkpoint/shard_index.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace conclave::inline v0::checkpoint {

// Safe to use from several threads.
class TensorData {
 public:
  virtual ~TensorData() = default;
  // Copies bytes [offset, offset + destination.size()) of the tensor.
  virtual void read(int32_t tensor, uint64_t offset, std::span<std::byte> destination) const = 0;
  // The tensor's bytes in place; empty if they are not in memory.
  virtual std::span<const std::byte> mapped(int32_t tensor) const = 0;
  // Gives bytes [offset, offset + bytes) of a mapping back to the system.
  virtual void release(int32_t /*tensor*/, uint64_t /*offset*/, uint64_t /*bytes*/) const noexcept {
  }
};

// Reads from shards, which must outlive it.
class ShardData final : public TensorData {
 public:
  explicit ShardData(const ShardSet& shards) : shards_(shards) {}

  void read(int32_t tensor, uint64_t offset, std::span<std::byte> destination) const override {
    file_of(tensor).read(shards_.info(tensor), offset, destination);
  }
  std::span<const std::byte> mapped(int32_t tensor) const override {
    return file_of(tensor).mapped(shards_.info(tensor));
  }
  void release(int32_t tensor, uint64_t offset, uint64_t bytes) const noexcept override {
    file_of(tensor).release(shards_.info(tensor), offset, bytes);
  }

 private:
  const SafetensorsFile& file_of(int32_t tensor) const {
    return shards_.files[static_cast<size_t>(shards_.tensors[static_cast<size_t>(tensor)].shard)];
  }

  const ShardSet& shards_;
};

}  // namespace conclave::inline v0::checkpoint
