#include "layer/cuda/code_factors.h"

#include "core/float_convert.h"
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/short_scales.h"
#include "layer/cuda/exact_factors.h"
#include "layer/cuda/step_factors.h"
#include "quant/code_meaning.h"
#include "quant/weight_format.h"

#include <algorithm>
#include <cstddef>
#include <span>

namespace conclave::inline v0 {
namespace {

// A cache line of each group's numbers, from rows that stay in a core's first cache.
constexpr int64_t kRowsAtOnce = 16;

// Factors of the codes of one expert's gate and up, or of its down, as a kernel reads them.
class FactorBuffer {
 public:
  // Other ranks hold `skipped` columns that share the first scale.
  FactorBuffer(const experts::ExpertsProblem& problem, const experts::FactorPlanes& planes,
               int64_t skipped)
      : planes_(planes),
        stored_(problem.quant.block_cols),
        least_(quant::format_of(problem.weight_dtype).codes->whole.least),
        skipped_(skipped),
        scales_(static_cast<size_t>(numbers_of(planes))),
        zeros_(planes.zeros == nullptr ? 0 : scales_.size()),
        offsets_(planes.offsets == nullptr ? 0 : scales_.size()) {}

  void set_part(int64_t part, const CodeMeaning& meaning, const MatrixPlaces& places) {
    std::vector<int64_t> groups;
    for (int64_t group = 0; group < planes_.groups; ++group) {
      groups.push_back(stored_group(group, places));
    }
    for (int64_t first = 0; first < planes_.rows; first += kRowsAtOnce) {
      const int64_t end = std::min(first + kRowsAtOnce, planes_.rows);
      for (int64_t group = 0; group < planes_.groups; ++group) {
        const int64_t to = (group * planes_.parts + part) * planes_.row_stride;
        const int64_t whole = groups[static_cast<size_t>(group)];
        for (int64_t row = first; row < end; ++row) {
          set(static_cast<size_t>(to + row), meaning, stored_row(row, places), whole);
        }
      }
    }
  }
  void copy_to(int64_t place, WeightUpload& upload, CudaMatrixMemory& memory) {
    if (!memory.has_short_scales.empty()) {
      memory.has_short_scales[static_cast<size_t>(place)] = std::ranges::all_of(
          scales_, [&](float scale) { return experts::is_short_scale(scale, least_); });
    }
    const int64_t first = place * numbers_of(planes_);
    upload.copy_floats(scales_, memory.factor_scale.as<float>() + first);
    if (!offsets_.empty()) {
      upload.copy_floats(offsets_, memory.factor_offset.as<float>() + first);
    }
    if (zeros_.empty()) return;
    upload.copy_bytes(std::as_bytes(std::span(zeros_)), memory.factor_zero.as<uint16_t>() + first);
  }

 private:
  int64_t stored_group(int64_t group, const MatrixPlaces& places) const {
    const int64_t column = group * planes_.columns;
    if (places.groups.empty()) return (skipped_ + column) / stored_;
    return places.groups[static_cast<size_t>(column / places.group)];
  }
  static int64_t stored_row(int64_t row, const MatrixPlaces& places) {
    return places.rows.empty() ? row : int64_t{places.rows[static_cast<size_t>(row)]};
  }
  // If nothing is stored weights are 0, whatever the codes are. Zero points are offsets in units
  // of a scale.
  void set(size_t to, const CodeMeaning& meaning, int64_t row, int64_t group) {
    const bool is_there = row >= 0 && group >= 0;
    const auto from = is_there ? static_cast<size_t>(row * meaning.groups + group) : 0;
    const float scale = is_there ? meaning.scales[from] : 0.0F;
    scales_[to] = scale;
    if (!offsets_.empty()) offsets_[to] = is_there ? meaning.offsets[from] : 0.0F;
    if (zeros_.empty()) return;
    zeros_[to] = scale != 0 ? float_to_bf16(meaning.offsets[from] / scale) : uint16_t{0};
  }

  experts::FactorPlanes planes_;
  int64_t stored_;  // columns of a scale
  int32_t least_;   // the value of code 0, of numbers in their order
  int64_t skipped_;
  std::vector<float> scales_;
  std::vector<uint16_t> zeros_;  // bf16
  std::vector<float> offsets_;
};

// Tells kernels what all experts have in common.
void tell_short_scales(UploadLanes& lanes, const CudaMlpWeights& weights) {
  for (const CudaMatrixMemory* memory : {&weights.gate_up, &weights.down}) {
    if (memory->short_scales.empty()) continue;
    lanes.own().copy_ints({has_only_short_scales(*memory) ? 1 : 0},
                          memory->short_scales.as<int32_t>());
  }
}

}  // namespace

void fill_factors(const MlpSource& mlp, const std::vector<ExpertPlaces>& places, UploadLanes& lanes,
                  CudaMlpWeights& weights, const Context& context) {
  const experts::ExpertsProblem& problem = mlp.problem;
  if (experts::factor_form(problem) == experts::FactorForm::kExact) {
    return fill_exact_factors(mlp, lanes, weights);
  }
  if (experts::has_steps(experts::factor_form(problem))) {
    fill_step_factors(mlp, lanes, weights, context);
    return tell_short_scales(lanes, weights);
  }
  lanes.for_each(mlp.count(), [&](WeightUpload& lane) {
    return [&, gate_up = FactorBuffer(problem, weights.view.gate_up.factors, 0),
            down = FactorBuffer(problem, weights.view.down.factors, problem.skipped_columns)](
               int64_t index) mutable {
      const LocalExpert& expert = mlp.experts[static_cast<size_t>(index)];
      const ExpertPlaces& at = places[static_cast<size_t>(index)];
      const auto read = [&](WeightMatrix matrix) {
        return load_meaning(problem.quant, lane.on_host(), expert.id(matrix), expert.expert,
                            expert.block_of(matrix, problem.hidden_size));
      };
      if (mlp.has(MlpHalf::kGateUp)) {
        if (problem.activation.gated) gate_up.set_part(0, read(WeightMatrix::kGate), at.gate);
        gate_up.set_part(mlp.halves() - 1, read(WeightMatrix::kUp), at.up);
        gate_up.copy_to(expert.place, lane, weights.gate_up);
      }
      if (!mlp.has(MlpHalf::kDown)) return;
      down.set_part(0, read(WeightMatrix::kDown), at.down);
      down.copy_to(expert.place, lane, weights.down);
    };
  });
  tell_short_scales(lanes, weights);
}

bool has_only_short_scales(const CudaMatrixMemory& memory) {
  return std::ranges::find(memory.has_short_scales, 0) == memory.has_short_scales.end();
}

}  // namespace conclave::inline v0
