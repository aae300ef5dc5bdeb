// Weights of a layer of a model's size, in memory of one kind.
#pragma once

#include "conclave/tensor.h"
#include "conclave/weights.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>
#include <stdexcept>
#include <vector>

namespace conclave::bench {

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

enum class Memory { kPageable, kPinned, kDevice };

// A layer's weights in one block. Every expert has the values of the first one, which takes the
// less time to make.
class CopiedSource final : public WeightSource {
 public:
  CopiedSource(const WeightSource& source, Memory memory) : memory_(memory) {
    size_t size = 0;
    for (const WeightId id : weights::kAll) {
      infos_[id] = source.describe(id);
      first_[id] = size;
      size += padded(infos_[id]) * static_cast<size_t>(infos_[id].count);
    }
    pageable_.resize(size);
    data_ = pageable_.data();
    for (const WeightId id : weights::kAll) fill(source, id);
    if (memory == Memory::kPageable) return;
    if (memory == Memory::kPinned) {
      check(cudaMallocHost(&other_, size));
    } else {
      check(cudaMalloc(&other_, size));
    }
    check(cudaMemcpy(other_, pageable_.data(), size, cudaMemcpyDefault));
    pageable_ = {};
    data_ = static_cast<std::byte*>(other_);
  }
  CopiedSource(const CopiedSource&) = delete;
  CopiedSource& operator=(const CopiedSource&) = delete;
  ~CopiedSource() override {
    static_cast<void>(memory_ == Memory::kPinned ? cudaFreeHost(other_) : cudaFree(other_));
  }

  size_t bytes() const { return bytes_; }
  const std::byte* data() const { return data_; }

  MemoryKind memory() const override {
    return memory_ == Memory::kDevice ? MemoryKind::kDevice : MemoryKind::kHost;
  }
  WeightInfo describe(WeightId id) const override { return infos_[id]; }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    const WeightInfo& info = infos_[id];
    const size_t row = bytes_of(info) / static_cast<size_t>(info.rows);
    const auto first = static_cast<size_t>(block.row_begin);
    std::copy_n(at(id, expert) + first * row, destination.size(), destination.data());
  }
  ConstTensorView view(WeightId id, int64_t expert) const override {
    const WeightInfo& info = infos_[id];
    return {at(id, expert), info.dtype, {info.rows, info.cols}};
  }

 private:
  static size_t bytes_of(const WeightInfo& info) {
    return info.count == 0 ? 0 : dense_bytes(info.dtype, {info.rows, info.cols});
  }
  static size_t padded(const WeightInfo& info) { return (bytes_of(info) + 255) / 256 * 256; }
  std::byte* at(WeightId id, int64_t expert) const {
    return data_ + first_[id] + static_cast<size_t>(expert) * padded(infos_[id]);
  }
  void fill(const WeightSource& source, WeightId id) {
    const WeightInfo& info = infos_[id];
    for (int64_t expert = 0; expert < info.count; ++expert) {
      const std::span<std::byte> place(at(id, expert), bytes_of(info));
      if (expert == 0) source.read(id, 0, {0, info.rows, 0, info.cols}, place);
      if (expert > 0) std::copy_n(at(id, 0), place.size(), place.data());
      bytes_ += place.size();
    }
  }

  Memory memory_;
  WeightTable<WeightInfo> infos_;
  WeightTable<size_t> first_;
  size_t bytes_ = 0;
  std::vector<std::byte> pageable_;
  void* other_ = nullptr;
  std::byte* data_ = nullptr;
};

}  // namespace conclave::bench
