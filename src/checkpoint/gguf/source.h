// Reads the weights of one layer from a GGUF file.
#pragma once

#include "checkpoint/gguf/hashed_file.h"
#include "checkpoint/gguf/layer_form.h"
#include "checkpoint/gguf/layer_tensors.h"
#include "checkpoint/gguf/row_reader.h"

#include "conclave/weights.h"

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

class GgufSource final : public WeightSource {
 public:
  // `verifier` may be null. It and the layer must outlive the source.
  GgufSource(const GgufLayer& layer, const GgufForm& form, const GgufVerifier* verifier = nullptr)
      : layer_(layer), form_(form), verifier_(verifier) {}

  WeightInfo describe(WeightId id) const override;
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override;
  // Values of the layer's own type that are in memory and have no factor.
  ConstTensorView view(WeightId id, int64_t expert) const override;
  void release(WeightId id, int64_t expert, const WeightBlock& block) const override;
  std::string locate(WeightId id, int64_t expert) const override;

 private:
  // The matrix that a plane gives a meaning to, or the id itself.
  static WeightId matrix_of(WeightId id);
  const GgufMatrix& stored(WeightId id, int64_t expert) const;
  // Rows [begin, end) of a matrix, whole, as they lie in the file.
  std::vector<std::byte> read_rows(const GgufMatrix& matrix, int64_t cols, int64_t begin,
                                   int64_t end) const;
  DType type_of(WeightId id) const;
  float factor_of(WeightId matrix, int64_t expert) const;
  std::unique_ptr<RowReader> make_rows(WeightId id, int64_t expert, DType dtype,
                                       const io::GgufType& type) const;

  const GgufLayer& layer_;
  GgufForm form_;
  const GgufVerifier* verifier_;
};

}  // namespace conclave::inline v0::checkpoint
