// Reads the weights of a layer whose experts are stored in several forms, in one that holds them
// all.
#pragma once

#include "checkpoint/common_form.h"
#include "checkpoint/layer_map.h"
#include "checkpoint/layer_source.h"
#include "checkpoint/manifest.h"
#include "checkpoint/tensor_data.h"
#include "checkpoint/tensor_table.h"
#include "quant/planes.h"

#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

class MixedSource final : public WeightSource {
 public:
  // `verifier` may be null. All arguments must outlive the source.
  MixedSource(const TensorTable& table, const TensorData& data, const LayerMap& layer,
              const Verifier* verifier);

  WeightInfo describe(WeightId id) const override;
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override;
  ConstTensorView view(WeightId id, int64_t expert) const override;
  std::string locate(WeightId id, int64_t expert) const override;

 private:
  // The part that has an expert's matrix.
  struct Stored {
    const LayerSource& source;
    MatrixMeaning meaning;
  };
  static bool is_of_experts(WeightId id);
  // The part that has all matrices of the id's MLP just as they are wanted; null if there is none.
  const LayerSource* whole_part(WeightId id) const;
  size_t part_of(WeightId matrix, int64_t expert) const;
  const LayerSource* find_whole(WeightMlp mlp) const;
  Stored stored(WeightId matrix, int64_t expert) const;
  MatrixMeaning wanted(WeightId id) const;
  std::optional<quant::PlaneShape> plane_of(WeightId id) const;

  void read_matrix(WeightId matrix, int64_t expert, const WeightBlock& block,
                   std::span<std::byte> destination) const;
  void read_codes(const Stored& from, WeightId matrix, int64_t expert, const WeightBlock& block,
                  std::span<std::byte> destination) const;
  // Scales or offsets of blocks of the common form.
  void read_numbers(WeightId id, int64_t expert, const WeightBlock& block,
                    std::span<float> numbers) const;
  void read_columns(WeightId id, int64_t expert, const WeightBlock& block,
                    std::span<std::byte> destination) const;
  void read_floats(WeightId id, int64_t expert, const WeightBlock& block,
                   std::span<float> numbers) const;

  const LayerMap& layer_;
  std::vector<std::unique_ptr<LayerSource>> parts_;
  LayerSource rest_;  // what belongs to no expert
  const LayerSource* whole_routed_ = nullptr;
  const LayerSource* whole_shared_ = nullptr;
};

// The source of a layer in one form or in several.
std::unique_ptr<WeightSource> make_layer_source(const TensorTable& table, const TensorData& data,
                                                const LayerMap& layer, const Verifier* verifier);

}  // namespace conclave::inline v0::checkpoint
