// Weights in memory that processes share: a trainer writes them, layers read them as a
// WeightSource, without a copy between.
#pragma once

#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0 {

// One array of a layer's weights in shared memory: `info.count` matrices, of which those of
// `experts` are there, in that order; empty: all.
struct SharedTensor {
  WeightId id = weights::kRouter;
  WeightInfo info = {};
  std::vector<int32_t> experts = {};
};

// Writes one file, best in /dev/shm, with room for the tensors declared. Versions follow each
// other: begin, write or memory() for each matrix, publish. From begin to publish readers are told
// that the weights are incomplete, and so they are where a writer dies meanwhile. Calls from one
// thread at a time, but for writes of different matrices and memory(). No other process may write
// the file.
class CONCLAVE_API SharedWeightsWriter {
 public:
  // Makes the file, or replaces what has its name: readers of an old one keep that. `layer` is any
  // number that tells layers apart. Throws Error: kInvalidArgument naming the tensor that comes
  // twice or is none; kSizeOverflow; kFileAccess, kFileWrite if there is no room.
  SharedWeightsWriter(const std::filesystem::path& path, std::span<const SharedTensor> tensors,
                      uint64_t layer = 0);
  SharedWeightsWriter(SharedWeightsWriter&&) noexcept;
  SharedWeightsWriter& operator=(SharedWeightsWriter&&) noexcept;
  // Leaves the file, in whatever state it is; whoever no longer needs it removes it.
  ~SharedWeightsWriter();

  // Marks the contents as incomplete. Throws Error(kState) if it has begun already.
  void begin();
  // The bytes of a matrix, dense and row-major, 64-byte aligned, to be written between begin and
  // publish. Throws Error(kInvalidArgument) for one that was not declared, kState before begin.
  std::span<std::byte> memory(WeightId id, int64_t expert);
  // Copies a matrix there. `bytes` must have its size.
  void write(WeightId id, int64_t expert, std::span<const std::byte> bytes);
  // Computes the checksum of all matrices and marks them as complete: `version`, larger than the
  // last one; 0: one more. Throws Error(kState) before begin, kInvalidArgument.
  void publish(uint64_t version = 0);
  uint64_t version() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Whether a reader computes the checksum of all bytes when it opens a file. Without it a reader
// relies on the marks of begin and publish alone.
enum class SharedChecksum : uint8_t { kVerify, kSkip };

// The weights of such a file at the version that it had when it was opened. Everything in the
// header is checked before it is used, against the file's size. Layers call check_unchanged after
// they have read, before they use anything, so that no layer runs on what a writer overwrote
// meanwhile. No process may truncate the file. Safe from several threads.
class CONCLAVE_API SharedWeights final : public WeightSource {
 public:
  // Throws Error: kFileNotFound, kFileAccess, kFileNotRegular; kInvalidArgument naming the field of
  // a header that is none of these; kFileChanged if a writer is at work or died, or the checksum
  // differs.
  explicit SharedWeights(const std::filesystem::path& path,
                         SharedChecksum checksum = SharedChecksum::kVerify);
  SharedWeights(SharedWeights&&) noexcept;
  SharedWeights& operator=(SharedWeights&&) noexcept;
  ~SharedWeights() override;

  uint64_t version() const noexcept;
  uint64_t layer() const noexcept;
  // Lists the tensors in the order of the header: scopes of a refit can be made of them.
  std::vector<SharedTensor> tensors() const;
  // Throws Error(kFileChanged) if a writer has begun another version since.
  void check_unchanged() const override;

  WeightInfo describe(WeightId id) const override;
  // Throws Error(kTensorMissing) for an expert that is not there, kFileChanged as above, after it
  // has copied.
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override;
  ConstTensorView view(WeightId id, int64_t expert) const override;
  std::string locate(WeightId id, int64_t expert) const override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace conclave::inline v0
