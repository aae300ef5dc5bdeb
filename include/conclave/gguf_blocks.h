// Layers of blocks as GGUF files store them, which lie in memory: for programs that read such files
// themselves.
#pragma once

#include "conclave/spec.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace conclave::inline v0 {

// The weights of one layer, matrix by matrix in any order. Blocks become the codes, scales and
// offsets that a Checkpoint makes of a file, whichever types gate, up and down have. One thread at
// a time may put; sources may be read from several as long as nothing is put.
class CONCLAVE_API GgufBlocks {
 public:
  // `spec` says what the layer would be without blocks. Throws as validate(spec), and
  // Error(kUnsupportedQuantization) where it has codes already.
  explicit GgufBlocks(const MoeSpec& spec);
  GgufBlocks(GgufBlocks&&) noexcept;
  GgufBlocks& operator=(GgufBlocks&&) noexcept;
  ~GgufBlocks();

  // Rows of a type by its name ("Q4_K"), one after the other, of a matrix or vector of the spec.
  // The bytes must live as long as this and its sources. What was put before is replaced. Throws
  // Error(kInvalidArgument) for an id or expert that the layer does not have,
  // Error(kGgufTensorType, kTensorDType, kGgufShape, kShape).
  void put(WeightId id, int64_t expert, std::string_view type, std::span<const std::byte> rows);

  // The spec with the type of codes that holds all blocks. Both throw Error(kTensorMissing).
  MoeSpec spec() const;
  // This must outlive the source.
  std::unique_ptr<WeightSource> source() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace conclave::inline v0
