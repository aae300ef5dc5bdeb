// Reads the weights of one layer from the shards.
#pragma once

#include "checkpoint/layer_map.h"
#include "checkpoint/manifest.h"
#include "checkpoint/plane_data.h"
#include "checkpoint/tensor_data.h"
#include "checkpoint/tensor_table.h"

#include "conclave/weights.h"

#include <string>

namespace conclave::inline v0::checkpoint {

class LayerSource final : public WeightSource {
 public:
  // `verifier` may be null. All arguments must outlive the source.
  LayerSource(const TensorTable& table, const TensorData& data, const LayerMap& layer,
              const Verifier* verifier)
      : table_(table),
        data_(data),
        layer_(layer),
        verifier_(verifier),
        planes_(table, data, verifier) {}

  WeightInfo describe(WeightId id) const override { return layer_.stored[id].info; }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override;
  ConstTensorView view(WeightId id, int64_t expert) const override;
  void release(WeightId id, int64_t expert, const WeightBlock& block) const override;
  std::string locate(WeightId id, int64_t expert) const override;

 private:
  const MatrixLocation& matrix_of(WeightId id, int64_t expert) const;
  // Null for a matrix that lies as the layer's spec says.
  const PlaneReading* reading_of(const MatrixLocation& matrix) const;
  void read_decoded(const PlaneReading& reading, const MatrixLocation& matrix,
                    const WeightBlock& block, std::span<std::byte> destination) const;
  void verify(const MatrixLocation& matrix, DType dtype) const;
  void read_verified(int32_t tensor, uint64_t offset, std::span<std::byte> destination) const;

  const TensorTable& table_;
  const TensorData& data_;
  const LayerMap& layer_;
  const Verifier* verifier_;
  PlaneCache planes_;
};

}  // namespace conclave::inline v0::checkpoint
