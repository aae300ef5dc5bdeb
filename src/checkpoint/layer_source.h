// The weights of one layer, read from the shards.
#pragma once

#include "checkpoint/manifest.h"
#include "checkpoint/role_map.h"
#include "checkpoint/shard_index.h"

#include "conclave/weights.h"

#include <string>

namespace conclave::inline v0::checkpoint {

// A tensor in its file.
struct FileRange {
  const SafetensorsFile& file;
  const TensorInfo& tensor;
  size_t element_bytes;
};

class LayerSource final : public WeightSource {
 public:
  // `verifier` may be null. All must outlive the source.
  LayerSource(const ShardSet& shards, const LayerMap& layer, const Verifier* verifier)
      : shards_(shards), layer_(layer), verifier_(verifier) {}

  WeightInfo describe(WeightRole role) const override { return layer_.role(role).info; }
  void read(WeightRole role, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override;
  ConstTensorView view(WeightRole role, int64_t expert) const override;
  std::string locate(WeightRole role, int64_t expert) const override;

 private:
  const MatrixLocation& matrix_of(WeightRole role, int64_t expert) const;
  void verify(const MatrixLocation& matrix, DType dtype) const;
  void read_verified(const FileRange& from, int64_t first, int32_t tensor,
                     std::span<std::byte> destination) const;

  const ShardSet& shards_;
  const LayerMap& layer_;
  const Verifier* verifier_;
};

}  // namespace conclave::inline v0::checkpoint
