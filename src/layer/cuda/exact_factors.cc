#include "layer/cuda/exact_factors.h"

#include "experts/cuda/factor_planes.h"
#include "experts/cuda/scale_bytes.h"
#include "quant/code_meaning.h"
#include "quant/scale_type.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
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
        skipped_(skipped),
        bytes_(static_cast<size_t>(exact_bytes(planes))),
        sum_factors_(static_cast<size_t>(planes.parts)) {
    local_.has_global_scale = false;
  }

  // Returns whether the scales have bytes of the form.
  bool set_part(int64_t part, const WeightSource& source, WeightId id, int64_t expert,
                const WeightBlock& block) {
    const CodeMeaning meaning = load_meaning(local_, source, id, expert, block);
    check(meaning.scales, source, id.with(WeightPlane::kScale), expert);
    const experts::ScaleBytes scale_bytes(quant_.scale_values, form_, meaning.scales);
    if (must_be_near_) check_span(scale_bytes.span(), source, id.with(WeightPlane::kScale), expert);
    if (!scale_bytes.fit()) return false;
    for (int64_t row = 0; row < planes_.rows; ++row) {
      const int64_t to = experts::exact_row(row, part, planes_.parts);
      for (int64_t group = 0; group < planes_.groups; ++group) {
        const int64_t stored = (skipped_ + group * planes_.columns) / quant_.block_cols;
        bytes_[static_cast<size_t>(group * planes_.byte_stride + to)] = static_cast<std::byte>(
            scale_bytes.of(meaning.scales[static_cast<size_t>(row * meaning.groups + stored)]));
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
  void copy_to(int64_t expert, WeightUpload& upload, const CudaMatrixMemory& memory) const {
    upload.copy_bytes(bytes_, memory.factor_scale.as() + expert * exact_bytes(planes_));
    upload.copy_floats(sum_factors_, memory.sum_factor.as<float>() + expert * planes_.parts);
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
  int64_t skipped_;
  std::vector<std::byte> bytes_;
  std::vector<float> sum_factors_;
};

// Returns false, midway, if some scales have no bytes of the form.
bool fill_in(experts::ByteForm form, const MlpSource& mlp, WeightUpload& upload,
             CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  ExactBuffer gate_up(mlp, form, weights.view.gate_up.factors, 0);
  ExactBuffer down(mlp, form, weights.view.down.factors, problem.skipped_columns);
  for (size_t i = 0; i < mlp.experts.size(); ++i) {
    const LocalExpert& expert = mlp.experts[i];
    const auto set = [&](ExactBuffer& buffer, int64_t part, WeightMatrix matrix) {
      return buffer.set_part(part, upload.on_host(), expert.id(matrix), expert.expert,
                             expert.block_of(matrix, problem.hidden_size));
    };
    if (problem.activation.gated && !set(gate_up, 0, WeightMatrix::kGate)) return false;
    if (!set(gate_up, mlp.halves() - 1, WeightMatrix::kUp)) return false;
    if (!set(down, 0, WeightMatrix::kDown)) return false;
    gate_up.copy_to(static_cast<int64_t>(i), upload, weights.gate_up);
    down.copy_to(static_cast<int64_t>(i), upload, weights.down);
  }
  for (const CudaMatrixMemory* memory : {&weights.gate_up, &weights.down}) {
    upload.copy_ints({static_cast<int32_t>(form)}, memory->byte_form.as<int32_t>());
  }
  return true;
}

}  // namespace

void fill_exact_factors(const MlpSource& mlp, WeightUpload& upload, CudaMlpWeights& weights) {
  // One form serves all experts, so that kernels ask for it once.
  if (fill_in(experts::ByteForm::kNear, mlp, upload, weights)) return;
  fill_in(experts::ByteForm::kAsStored, mlp, upload, weights);
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
