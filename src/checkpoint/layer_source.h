// The weights of one layer, read from the shards.
#pragma once

#include "checkpoint/manifest.h"
#include "checkpoint/role_map.h"
#include "checkpoint/shard_index.h"

#include "conclave/weights.h"

#include <string>

namespace conclave::inline v0::checkpoint {

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

  const ShardSet& shards_;
  const LayerMap& layer_;
  const Verifier* verifier_;
};

}  // namespace conclave::inline v0::checkpoint
