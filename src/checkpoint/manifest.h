// conclave.manifest.json: one hash per tensor, or one per expert for stacked tensors, and the check
// of tensor data against it.
#pragma once

#include "checkpoint/shard_index.h"
#include "io/directory.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

inline constexpr std::string_view kManifestFile = "conclave.manifest.json";

// The pieces in which a tensor is hashed: the slices along the first axis of a stack (rank 3 or
// more), otherwise the whole tensor.
struct HashBlocks {
  int64_t count = 1;
  uint64_t bytes = 0;  // per piece
};
HashBlocks hash_blocks(const TensorInfo& tensor);

// Throws Error(kFileRead, kFileWrite). The file appears under its name only when it is complete.
void write_manifest_file(const io::Directory& directory, const ShardSet& shards);

// Checks blocks on first use. Safe to use from several threads.
class Verifier {
 public:
  // Throws Error(kFileNotFound) without a manifest, and Error(kChecksum) naming the tensor if
  // manifest and shards differ in the tensors they list, or in a type or shape. `shards` must
  // outlive it.
  Verifier(const io::Directory& directory, const ShardSet& shards);

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

  const ShardSet& shards_;
  std::vector<Blocks> tensors_;  // in the order of ShardSet::tensors
  std::vector<uint64_t> hashes_;
  std::unique_ptr<std::atomic<bool>[]> verified_;
};

}  // namespace conclave::inline v0::checkpoint
