#include "layer/cuda/exact_factors.h"

#include "experts/cuda/factor_planes.h"
#include "experts/cuda/scale_bytes.h"
#include "quant/code_meaning.h"
#include "quant/scale_type.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <vector>

namespace conclave::inline v0 {
namespace {

// Factors of the codes of one expert's gate and up, or of its down.
class ExactBuffer {
 public:
  ExactBuffer(const MlpSource& mlp, experts::ByteForm form, const experts::FactorPlanes& planes,
              int64_t skipped)
      : quant_(mlp.problem.quant),
        local_(mlp.problem.quant),
        must_be_near_(mlp.forms.near_scales),
        form_(form),
        planes_(planes),
        bytes_(static_cast<size_t>(exact_bytes(planes))),
        sum_factors_(static_cast<size_t>(planes.parts)) {
    local_.has_global_scale = false;
    for (int64_t group = 0; group < planes.groups; ++group) {
      stored_.push_back((skipped + group * planes.columns) / quant_.block_cols);
    }
  }

  // Returns whether the scales have bytes of the form.
  bool set_part(int64_t part, const WeightSource& source, WeightId id, int64_t expert,
                const WeightBlock& block, int64_t rows_at_once) {
    int64_t groups = 0;
    scales_.clear();
    WeightBlock rows = block;
    for (; rows.row_begin < block.row_end; rows.row_begin = rows.row_end) {
      rows.row_end = std::min(rows.row_begin + rows_at_once, block.row_end);
      const CodeMeaning meaning = load_meaning(local_, source, id, expert, rows);
      groups = meaning.groups;
      scales_.insert(scales_.end(), meaning.scales.begin(), meaning.scales.end());
    }
    check(scales_, source, id.with(WeightPlane::kScale), expert);
    const experts::ScaleBytes scale_bytes(quant_.scale_values, form_, scales_);
    if (must_be_near_) check_span(scale_bytes.span(), source, id.with(WeightPlane::kScale), expert);
    if (!scale_bytes.fit()) return false;
    for (int64_t row = 0; row < planes_.rows; ++row) {
      const int64_t to = experts::exact_row(row, part, planes_.parts);
      const float* const scales = scales_.data() + row * groups;
      for (int64_t group = 0; group < planes_.groups; ++group) {
        bytes_[static_cast<size_t>(group * planes_.byte_stride + to)] =
            static_cast<std::byte>(scale_bytes.of(scales[stored_[static_cast<size_t>(group)]]));
      }
    }
    float factor = scale_bytes.sum_factor();
    if (quant_.has_global_scale) {
      const WeightId global = id.with(WeightPlane::kGlobalScale);
      factor *= load_scales(quant_, source, global, expert, {0, 1, 0, 1}).front();
    }
    sum_factors_[static_cast<size_t>(part)] = factor;
    return true;
  }
  void copy_to(int64_t place, WeightUpload& upload, const CudaMatrixMemory& memory) const {
    upload.copy_bytes(bytes_, memory.factor_scale.as() + place * exact_bytes(planes_));
    upload.copy_floats(sum_factors_, memory.sum_factor.as<float>() + place * planes_.parts);
  }

 private:
  static void check_span(int32_t span, const WeightSource& source, WeightId id, int64_t expert) {
    if (span <= experts::kMostNearSpan) return;
    throw Error(ErrorCode::kTensorValue,
                {.what = "scales lie too far apart for the kernels of the layer",
                 .tensor = source.locate(id, expert),
                 .expected = fmt::format("powers of two within 2^{} of the largest",
                                         experts::kMostNearSpan),
                 .found = fmt::format("one at 2^-{} of it", span),
                 .hint = "create another layer for these weights"});
  }
  void check(const std::vector<float>& scales, const WeightSource& source, WeightId id,
             int64_t expert) const {
    for (const float scale : scales) {
      if (experts::has_scale(quant_.scale_values, scale)) continue;
      const DType type = quant::type_of_scales(quant_.scale_values);
      throw Error(
          ErrorCode::kTensorValue,
          {.what = "a scale is none that the layer holds",
           .tensor = source.locate(id, expert),
           .expected = fmt::format("a number that {} has", conclave::to_string(type)),
           .found = fmt::format("{}", scale),
           .hint = "a layer holds any if it is made with ScaleValues::kFloat of a source of "
                   "float32 scales"});
    }
  }

  const QuantSpec& quant_;
  QuantSpec local_;  // says what scales are without those of whole matrices
  bool must_be_near_;
  experts::ByteForm form_;
  experts::FactorPlanes planes_;
  std::vector<float> scales_;    // a matrix has these; the next one takes their memory
  std::vector<int64_t> stored_;  // the stored group of each
  std::vector<std::byte> bytes_;
  std::vector<float> sum_factors_;
};

// Fills one half of the experts; returns false, midway, if some scales have no bytes of the form.
bool fill_in(experts::ByteForm form, MlpHalf half, const MlpSource& mlp, UploadLanes& lanes,
             CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const bool is_down = half == MlpHalf::kDown;
  CudaMatrixMemory& memory = weights.of(half);
  const experts::FactorPlanes& planes =
      (is_down ? weights.view.down : weights.view.gate_up).factors;
  std::atomic<bool> fit{true};
  lanes.for_each(mlp.count(), [&](WeightUpload& lane) {
    return [&, buffer = ExactBuffer(mlp, form, planes, is_down ? problem.skipped_columns : 0)](
               int64_t index) mutable {
      const LocalExpert& expert = mlp.experts[static_cast<size_t>(index)];
      const auto set = [&](int64_t part, WeightMatrix matrix) {
        if (!fit.load(std::memory_order_relaxed)) return;
        const WeightBlock block = expert.block_of(matrix, problem.hidden_size);
        const bool is_good =
            buffer.set_part(part, lane.on_host(), expert.id(matrix), expert.expert, block,
                            lane.scale_rows(block.row_end - block.row_begin));
        if (!is_good) fit.store(false, std::memory_order_relaxed);
      };
      if (is_down) {
        set(0, WeightMatrix::kDown);
      } else {
        if (problem.activation.gated) set(0, WeightMatrix::kGate);
        set(mlp.halves() - 1, WeightMatrix::kUp);
      }
      if (fit.load(std::memory_order_relaxed)) buffer.copy_to(expert.place, lane, memory);
    };
  });
  if (!fit.load()) return false;
  lanes.own().copy_ints({static_cast<int32_t>(form)}, memory.byte_form.as<int32_t>());
  memory.form = form;
  return true;
}

void fill_half(MlpHalf half, const MlpSource& mlp, UploadLanes& lanes, CudaMlpWeights& weights) {
  const experts::ByteForm first = mlp.byte_form.value_or(experts::ByteForm::kNear);
  if (fill_in(first, half, mlp, lanes, weights)) return;
  if (!mlp.byte_form) {
    fill_in(experts::ByteForm::kAsStored, half, mlp, lanes, weights);
    return;
  }
  throw Error(ErrorCode::kTensorValue,
              {.what = "scales of some experts have no bytes in the form that the layer has for "
                       "those of the others",
               .hint = "stage all experts in one call"});
}

}  // namespace

// One form serves a matrix of all experts, so that kernels ask for it once.
void fill_exact_factors(const MlpSource& mlp, UploadLanes& lanes, CudaMlpWeights& weights) {
  for (const MlpHalf half : {MlpHalf::kGateUp, MlpHalf::kDown}) {
    if (mlp.has(half)) fill_half(half, mlp, lanes, weights);
  }
}

int32_t scale_span(const MlpSource& mlp, const WeightSource& source) {
  const experts::ExpertsProblem& problem = mlp.problem;
  QuantSpec local = problem.quant;
  local.has_global_scale = false;
  int32_t most = 0;
  const auto add = [&](const LocalExpert& expert, WeightMatrix matrix) {
    const CodeMeaning meaning = load_meaning(local, source, expert.id(matrix), expert.expert,
                                             expert.block_of(matrix, problem.hidden_size));
    const experts::ScaleBytes bytes(local.scale_values, experts::ByteForm::kNear, meaning.scales);
    most = std::max(most, bytes.span());
  };
  for (const LocalExpert& expert : mlp.experts) {
    if (problem.activation.gated) add(expert, WeightMatrix::kGate);
    add(expert, WeightMatrix::kUp);
    add(expert, WeightMatrix::kDown);
  }
  return most;
}

}  // namespace conclave::inline v0
