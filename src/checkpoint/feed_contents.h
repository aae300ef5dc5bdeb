// A CheckpointFeed takes tensors under the names of one container or of another.
#pragma once

#include "conclave/checkpoint.h"
#include "conclave/gguf.h"
#include "conclave/tensor.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

// Its members mean and throw what CheckpointFeed promises.
struct FeedContents {
  FeedContents() = default;
  FeedContents(const FeedContents&) = delete;
  FeedContents& operator=(const FeedContents&) = delete;
  virtual ~FeedContents() = default;

  virtual bool put(std::string_view name, const ConstTensorView& tensor, FeedMemory memory) = 0;
  virtual bool put(std::string_view name, const GgufTensorView& tensor, FeedMemory memory) = 0;
  virtual std::span<const int64_t> layers() const noexcept = 0;
  virtual std::vector<std::string> missing(size_t limit) const = 0;
  virtual bool is_complete(int64_t layer) const = 0;
  virtual CheckpointLayer layer(int64_t index) const = 0;
  virtual std::unique_ptr<WeightSource> layer_source(int64_t index) const = 0;
  virtual void release(int64_t layer) = 0;
};

// Throws Error(kNullPointer, kStride) for a tensor that can be neither copied nor kept.
void check_fed_tensor(const std::string& name, const ConstTensorView& tensor, FeedMemory memory);
// Copies a tensor of so many bytes, whose rows may lie apart, row by row.
std::vector<std::byte> copy_dense(const ConstTensorView& tensor, size_t bytes);
// Throws Error(kLayerNotFound) that names the MoE layers there are.
[[noreturn]] void reject_layer(std::span<const int64_t> layers, int64_t index);

}  // namespace conclave::inline v0::checkpoint
