// The bytes of planes that a method stores in its own way: computed whole from the tensors that
// hold them, and kept for a while, since layers ask for them in pieces.
#pragma once

#include "checkpoint/manifest.h"
#include "checkpoint/stored_planes.h"
#include "checkpoint/tensor_data.h"
#include "checkpoint/tensor_table.h"

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace conclave::inline v0::checkpoint {

// Safe to use from several threads. Holds at most a number of bytes beside what is in use.
class PlaneCache {
 public:
  using Bytes = std::vector<std::byte>;

  // `verifier` may be null. All arguments must outlive the cache.
  PlaneCache(const TensorTable& table, const TensorData& data, const Verifier* verifier)
      : table_(table), data_(data), verifier_(verifier) {}

  // A slice of a plane that does not lie in place. Throws Error(kTensorValue) naming the tensor
  // whose values mean nothing, and what reading throws.
  std::shared_ptr<const Bytes> slice(const PlaneReading& reading, int64_t index) const;

 private:
  struct Key {
    int32_t tensor = 0;
    int64_t slice = 0;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  struct Entry {
    std::once_flag once;
    std::shared_ptr<Bytes> bytes = std::make_shared<Bytes>();
  };
  struct Kept {
    std::shared_ptr<Entry> entry;
    std::list<Key>::iterator use;
    size_t bytes = 0;
  };

  std::shared_ptr<Entry> entry_of(const Key& key, size_t bytes) const;
  void decode(const PlaneReading& reading, int64_t index, Bytes& plane) const;
  PlaneInput read_input(int32_t tensor, const PlaneReading& reading, int64_t index,
                        Bytes& buffer) const;

  const TensorTable& table_;
  const TensorData& data_;
  const Verifier* verifier_;
  mutable std::mutex mutex_;
  mutable std::map<Key, Kept> kept_;
  mutable std::list<Key> uses_;  // the latest first
  mutable size_t kept_bytes_ = 0;
};

// One slice of a plane as the data of a tensor of its own.
class SliceData final : public TensorData {
 public:
  explicit SliceData(std::shared_ptr<const PlaneCache::Bytes> bytes) : bytes_(std::move(bytes)) {}

  void read(int32_t tensor, uint64_t offset, std::span<std::byte> destination) const override;
  std::span<const std::byte> mapped(int32_t) const override { return *bytes_; }

 private:
  std::shared_ptr<const PlaneCache::Bytes> bytes_;
};

// The bytes of stored tensors, each converted by itself.
class ConvertedData final : public TensorData {
 public:
  ConvertedData(const TensorData& stored, void (*convert)(std::span<std::byte>))
      : stored_(stored), convert_(convert) {}

  void read(int32_t tensor, uint64_t offset, std::span<std::byte> destination) const override {
    stored_.read(tensor, offset, destination);
    convert_(destination);
  }
  std::span<const std::byte> mapped(int32_t) const override { return {}; }

 private:
  const TensorData& stored_;
  void (*convert_)(std::span<std::byte>);
};

}  // namespace conclave::inline v0::checkpoint
