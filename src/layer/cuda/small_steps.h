// Factors that are FactorForm::kSmallSteps as kernels read them.
#pragma once

#include "experts/cuda/device_experts.h"
#include "experts/problem.h"
#include "layer/cuda/weight_upload.h"
#include "layer/cuda/weights.h"
#include "quant/weight_block.h"

#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0 {

// Factors of the codes of one expert's gate and up, or of its down.
class SmallStepBuffer {
 public:
  SmallStepBuffer(const experts::ExpertsProblem& problem, const experts::FactorPlanes& planes);

  // Throws Error(kTensorValue) naming the tensor of a number that is no such step.
  void set_part(int64_t part, const WeightSource& source, WeightId id, int64_t expert,
                const WeightBlock& block, int64_t rows_at_once);
  void copy_to(int64_t place, WeightUpload& upload, CudaMatrixMemory& memory) const;

 private:
  // Numbers of a row, of which an offset is the second of two.
  struct OfRow {
    std::span<const float> numbers;
    int64_t row = 0;  // counts those of all parts
    int64_t number = 0;
  };

  int64_t rows() const { return planes_.parts * planes_.row_stride; }
  // False if they are no such steps.
  bool set_row(const OfRow& own);

  const QuantSpec& quant_;
  experts::FactorPlanes planes_;
  int64_t groups_of_unit_;
  std::vector<std::byte> steps_;
  std::vector<uint16_t> units_;  // f16
};

}  // namespace conclave::inline v0
