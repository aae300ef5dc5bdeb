// The manifest of a model: one hash per tensor, or one per expert for stacked tensors, and the
// check of tensor data against it. Any container of tensors has one.
#pragma once

#include "checkpoint/shard_index.h"
#include "io/directory.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

// The name in a model's directory, and what follows the name of a model that is a file.
inline constexpr std::string_view kManifestFile = "conclave.manifest.json";
inline constexpr std::string_view kManifestEnding = ".conclave.manifest.json";

// A tensor as a manifest lists it, which does not outlive the container.
struct HashedTensor {
  std::string_view name;
  std::string_view type;  // as the container calls it: "BF16", "Q4_K"
  std::span<const int64_t> shape;
  uint64_t bytes = 0;
};

// Tensors by their number, in the container's order. Thread rule: all members may be called from
// several threads.
class HashedTensors {
 public:
  virtual ~HashedTensors() = default;
  virtual int32_t count() const = 0;
  virtual HashedTensor at(int32_t tensor) const = 0;
  virtual std::string file_of(int32_t tensor) const = 0;  // its path
  // The whole tensor where it is mapped; empty otherwise.
  virtual std::span<const std::byte> mapped(int32_t tensor) const = 0;
  virtual void read(int32_t tensor, uint64_t offset, std::span<std::byte> destination) const = 0;
};

class ShardTensors final : public HashedTensors {
 public:
  // `shards` must outlive it.
  explicit ShardTensors(const ShardSet& shards) : shards_(shards) {}
  int32_t count() const override;
  HashedTensor at(int32_t tensor) const override;
  std::string file_of(int32_t tensor) const override;
  std::span<const std::byte> mapped(int32_t tensor) const override;
  void read(int32_t tensor, uint64_t offset, std::span<std::byte> destination) const override;

 private:
  const ShardSet& shards_;
};

// The pieces in which a tensor is hashed: the slices along the first axis of a stack (rank 3 or
// more), otherwise the whole tensor.
struct HashBlocks {
  int64_t count = 1;
  uint64_t bytes = 0;  // per piece
};
HashBlocks hash_blocks(const HashedTensor& tensor);

// Throws Error(kFileRead, kFileWrite). The file appears under its name only when it is complete.
void write_manifest_file(const io::Directory& directory, std::string_view name,
                         const HashedTensors& tensors);

// Checks blocks on first use. Safe to use from several threads.
class Verifier {
 public:
  // Throws Error(kFileNotFound) without a manifest of this name, and Error(kChecksum) naming the
  // tensor if manifest and model differ in the tensors they list, or in a type or shape.
  Verifier(const io::Directory& directory, std::string_view name,
           std::unique_ptr<const HashedTensors> tensors);

  // Throws Error(kChecksum) if the block that holds byte `offset` of the tensor differs from what
  // was hashed. Each block is read only once for this.
  void check(int32_t tensor, uint64_t offset) const;

  // Whether [offset, offset + bytes) of the tensor is one block: then the bytes themselves can be
  // checked once they have been read, and the file need not be read twice.
  bool is_block(int32_t tensor, uint64_t offset, uint64_t bytes) const;
  // Throws Error(kChecksum) if `bytes`, read from the block at `offset`, differ from what was
  // hashed.
  void check_bytes(int32_t tensor, uint64_t offset, std::span<const std::byte> bytes) const;

 private:
  size_t block_index(int32_t tensor, uint64_t offset) const;
  void compare(int32_t tensor, size_t index, uint64_t hash) const;

  struct Blocks {
    HashBlocks layout;
    size_t first = 0;  // into hashes_ and verified_
  };

  std::unique_ptr<const HashedTensors> model_;
  std::string name_;             // the manifest's
  std::vector<Blocks> tensors_;  // in the model's order
  std::vector<uint64_t> hashes_;
  std::unique_ptr<std::atomic<bool>[]> verified_;
};

}  // namespace conclave::inline v0::checkpoint
