#include "layer/cuda/mlp_weights.h"

#include "core/float_convert.h"
#include "core/quant_spec.h"
#include "core/weight_types.h"
#include "experts/cuda/factor_planes.h"
#include "layer/cuda/row_format.h"
#include "quant/code_meaning.h"
#include "quant/planes.h"

#include "conclave/error.h"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0 {
namespace {

// Kernels may read this many rows beyond the last expert, but never use them.
constexpr int64_t kSlackRows = 64;

// Sizes of an expert's part of gate_up or of down.
struct MatrixSizes {
  std::string name;
  int64_t parts = 1;  // gate and up
  int64_t rows = 0;   // each part has
  int64_t cols = 0;
  bool has_bias = false;
  // Columns that share factors in FactorPlanes; 0: all.
  int64_t factor_columns = 0;
};

// Scales of one part [rows, cols].
quant::PlaneShape scales_of(const experts::ExpertsProblem& problem, const MatrixSizes& sizes) {
  if (problem.quant.weights != WeightScale::kBlock) return {.rows = sizes.rows, .cols = 1};
  return quant::plane_of(WeightPlane::kScale, problem.weight_dtype, problem.quant, sizes.rows,
                         sizes.cols);
}

experts::FactorPlanes factors_of(const MatrixSizes& sizes) {
  const int64_t columns = sizes.factor_columns;
  return {.columns = columns,
          .groups = columns == 0 ? 1 : ceil_div(sizes.cols, columns),
          .parts = sizes.parts,
          .rows = sizes.rows,
          .row_stride = padded_row(sizes.rows, DType::kBF16)};
}

int64_t numbers_of(const experts::FactorPlanes& factors) {
  return factors.groups * factors.parts * factors.row_stride;
}

// Memory for scales and zero points in the forms that kernels read: as float32, of blocks as stored
// and else one for each row, or as factors.
void allocate_codes(const DeviceArrays& arrays, const MlpSource& mlp, const MatrixSizes& sizes,
                    CudaMatrixMemory& memory, experts::DeviceExpertMatrix& view) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const bool has_zeros = problem.quant.zeros != WeightZero::kNone;
  if (mlp.forms.floats) {
    const quant::PlaneShape scales = scales_of(problem, sizes);
    const int64_t count = mlp.count() * sizes.parts * scales.rows * scales.cols;
    memory.scale = arrays.floats(count, (sizes.name + "_scale").c_str());
    view.scale = memory.scale.as<float>();
    if (has_zeros) memory.offset = arrays.floats(count, (sizes.name + "_offset").c_str());
    view.offset = memory.offset.as<float>();
  }
  if (mlp.forms.factors) {
    view.factors = factors_of(sizes);
    const int64_t count = mlp.count() * numbers_of(view.factors);
    memory.factor_scale = arrays.floats(count, (sizes.name + "_scale").c_str());
    view.factors.scales = memory.factor_scale.as<float>();
    const experts::FactorForm form = experts::factor_form(problem);
    if (form == experts::FactorForm::kZeros) {
      memory.factor_zero =
          arrays.make(count * byte_size(DType::kBF16), (sizes.name + "_zero").c_str());
    }
    if (form == experts::FactorForm::kOffsets) {
      memory.factor_offset = arrays.floats(count, (sizes.name + "_offset").c_str());
    }
    view.factors.zeros = memory.factor_zero.as();
    view.factors.offsets = memory.factor_offset.as<float>();
  }
}

// Memory for all experts, none for a matrix in `place`; `view` points to what there is.
CudaMatrixMemory allocate_matrix(const DeviceArrays& arrays, const MlpSource& mlp,
                                 const MatrixSizes& sizes, const InPlaceMatrix& place,
                                 experts::DeviceExpertMatrix& view) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const DType dtype = problem.weight_dtype;
  const int64_t count = mlp.count();
  CudaMatrixMemory memory;
  view.data = place.data;
  view.stride = place.stride;
  if (place.data == nullptr) {
    view.stride = padded_row(sizes.cols, dtype);
    memory.data = arrays.make(
        (count * sizes.parts * sizes.rows + kSlackRows) * packed_bytes(dtype, view.stride),
        sizes.name.c_str());
    view.data = memory.data.as();
  }
  if (sizes.has_bias) {
    memory.bias = arrays.floats(count * sizes.parts * sizes.rows, (sizes.name + "_bias").c_str());
    view.bias = memory.bias.as<float>();
  }
  if (!is_plain(dtype)) allocate_codes(arrays, mlp, sizes, memory, view);
  return memory;
}

void fill_matrices(const MlpSource& mlp, WeightUpload& upload, CudaMlpWeights& weights,
                   const Context& context) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const DType dtype = problem.weight_dtype;
  const int64_t hidden = problem.hidden_size;
  const int64_t inner = problem.intermediate_size;
  const int64_t gate_up_pitch = packed_bytes(dtype, weights.view.gate_up.stride);
  const int64_t down_pitch = packed_bytes(dtype, weights.view.down.stride);
  const int64_t count = mlp.count();
  const int64_t expert_bytes =
      mlp.gate_up_rows() * packed_bytes(dtype, hidden) + hidden * packed_bytes(dtype, inner);
  for (int64_t local = 0; local < count; ++local) {
    const LocalExpert& expert = mlp.experts[static_cast<size_t>(local)];
    const auto copy = [&](WeightMatrix matrix, std::byte* data, int64_t pitch) {
      upload.copy({.id = expert.id(matrix),
                   .expert = expert.expert,
                   .block = expert.block_of(matrix, hidden)},
                  {.data = data, .stride_bytes = pitch});
    };
    std::byte* const gate_up =
        weights.gate_up.data.as() + local * mlp.gate_up_rows() * gate_up_pitch;
    if (problem.activation.gated) copy(WeightMatrix::kGate, gate_up, gate_up_pitch);
    copy(WeightMatrix::kUp, gate_up + (mlp.halves() - 1) * inner * gate_up_pitch, gate_up_pitch);
    copy(WeightMatrix::kDown, weights.down.data.as() + local * hidden * down_pitch, down_pitch);
    context.progress("uploading experts", (local + 1) * expert_bytes, count * expert_bytes);
  }
}

void fill_biases(const MlpSource& mlp, WeightUpload& upload, CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  if (!problem.has_bias) return;
  for (size_t i = 0; i < mlp.experts.size(); ++i) {
    const LocalExpert& expert = mlp.experts[i];
    if (!expert.has_bias) continue;
    const auto copy = [&](WeightMatrix matrix, float* place) {
      const WeightBlock rows = expert.block_of(matrix, problem.hidden_size);
      const quant::PlaneSlice bias = quant::slice({.plane = WeightPlane::kBias}, rows);
      upload.copy_floats(upload.read_floats({.id = expert.id(matrix, WeightPlane::kBias),
                                             .expert = expert.expert,
                                             .block = bias.block}),
                         place);
    };
    float* const gate_up =
        weights.gate_up.bias.as<float>() + static_cast<int64_t>(i) * mlp.gate_up_rows();
    if (problem.activation.gated) copy(WeightMatrix::kGate, gate_up);
    copy(WeightMatrix::kUp, gate_up + (mlp.halves() - 1) * problem.intermediate_size);
    if (!mlp.adds_down_bias || !expert.has_down_bias) continue;
    copy(WeightMatrix::kDown,
         weights.down.bias.as<float>() + static_cast<int64_t>(i) * problem.hidden_size);
  }
}

// Scales and offsets for the rows and columns of a matrix that this rank holds. `source` must be in
// host memory.
CodeMeaning read_meaning(const QuantSpec& quant, const WeightSource& source,
                         const LocalExpert& expert, WeightMatrix matrix, int64_t hidden) {
  const WeightId id = expert.id(matrix);
  const WeightBlock block = expert.block_of(matrix, hidden);
  const bool in_blocks = quant.weights == WeightScale::kBlock;
  return (in_blocks ? load_meaning_as_stored : load_meaning)(quant, source, id, expert.expert,
                                                             block);
}

// Factors of the codes of one expert's gate and up, or of its down, as a kernel reads them.
class FactorBuffer {
 public:
  // A scale has `stored` columns; other ranks hold `skipped` columns that share the first one.
  FactorBuffer(const experts::FactorPlanes& planes, int64_t stored, int64_t skipped)
      : planes_(planes),
        stored_(stored),
        skipped_(skipped),
        scales_(static_cast<size_t>(numbers_of(planes))),
        zeros_(planes.zeros == nullptr ? 0 : scales_.size()),
        offsets_(planes.offsets == nullptr ? 0 : scales_.size()) {}

  // Zero points are offsets in units of a scale.
  void set_part(int64_t part, const CodeMeaning& meaning) {
    for (int64_t row = 0; row < planes_.rows; ++row) {
      for (int64_t group = 0; group < planes_.groups; ++group) {
        const int64_t whole = (skipped_ + group * planes_.columns) / stored_;
        const auto from = static_cast<size_t>(row * meaning.groups + whole);
        const auto to =
            static_cast<size_t>((group * planes_.parts + part) * planes_.row_stride + row);
        const float scale = meaning.scales[from];
        scales_[to] = scale;
        if (!offsets_.empty()) offsets_[to] = meaning.offsets[from];
        if (zeros_.empty() || scale == 0) continue;
        zeros_[to] = float_to_bf16(meaning.offsets[from] / scale);
      }
    }
  }
  void copy_to(int64_t expert, WeightUpload& upload, const CudaMatrixMemory& memory) const {
    const int64_t first = expert * numbers_of(planes_);
    upload.copy_floats(scales_, memory.factor_scale.as<float>() + first);
    if (!offsets_.empty()) {
      upload.copy_floats(offsets_, memory.factor_offset.as<float>() + first);
    }
    if (zeros_.empty()) return;
    upload.copy_bytes(std::as_bytes(std::span(zeros_)), memory.factor_zero.as<uint16_t>() + first);
  }

 private:
  experts::FactorPlanes planes_;
  int64_t stored_;
  int64_t skipped_;
  std::vector<float> scales_;
  std::vector<uint16_t> zeros_;  // bf16
  std::vector<float> offsets_;
};

void fill_factors(const MlpSource& mlp, WeightUpload& upload, CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const int64_t stored = problem.quant.block_cols;
  FactorBuffer gate_up(weights.view.gate_up.factors, stored, 0);
  FactorBuffer down(weights.view.down.factors, stored, problem.skipped_columns);
  for (size_t i = 0; i < mlp.experts.size(); ++i) {
    const LocalExpert& expert = mlp.experts[i];
    const auto read = [&](WeightMatrix matrix) {
      return load_meaning(problem.quant, upload.on_host(), expert.id(matrix), expert.expert,
                          expert.block_of(matrix, problem.hidden_size));
    };
    if (problem.activation.gated) gate_up.set_part(0, read(WeightMatrix::kGate));
    gate_up.set_part(mlp.halves() - 1, read(WeightMatrix::kUp));
    down.set_part(0, read(WeightMatrix::kDown));
    gate_up.copy_to(static_cast<int64_t>(i), upload, weights.gate_up);
    down.copy_to(static_cast<int64_t>(i), upload, weights.down);
  }
}

// Places for what is copied next.
struct MeaningPlace {
  float* scales = nullptr;
  float* offsets = nullptr;
};

void fill_floats(const MlpSource& mlp, WeightUpload& upload, CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  MeaningPlace gate_up{weights.gate_up.scale.as<float>(), weights.gate_up.offset.as<float>()};
  MeaningPlace down{weights.down.scale.as<float>(), weights.down.offset.as<float>()};
  for (const LocalExpert& expert : mlp.experts) {
    const auto append = [&](WeightMatrix matrix, MeaningPlace& place) {
      const CodeMeaning meaning =
          read_meaning(problem.quant, upload.on_host(), expert, matrix, problem.hidden_size);
      upload.copy_floats(meaning.scales, place.scales);
      place.scales += meaning.scales.size();
      if (meaning.offsets.empty()) return;
      upload.copy_floats(meaning.offsets, place.offsets);
      place.offsets += meaning.offsets.size();
    };
    if (problem.activation.gated) append(WeightMatrix::kGate, gate_up);
    append(WeightMatrix::kUp, gate_up);
    append(WeightMatrix::kDown, down);
  }
}

void fill_scales(const MlpSource& mlp, WeightUpload& upload, CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  if (is_plain(problem.weight_dtype)) return;
  if (mlp.forms.floats) fill_floats(mlp, upload, weights);
  if (mlp.forms.factors) fill_factors(mlp, upload, weights);
  if (!mlp.experts.empty() && has_input_scale(problem.quant)) {
    const StaticScales steps = load_static_scales(upload.on_host(), mlp.experts.front().mlp);
    upload.copy_floats({steps.input, steps.intermediate}, weights.static_scales.as<float>());
  }
}

}  // namespace

CudaMlpWeights allocate_mlp(const DeviceArrays& arrays, const MlpSource& mlp,
                            const WeightSource& source) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const int64_t hidden = problem.hidden_size;
  const int64_t inner = problem.intermediate_size;
  CudaMlpWeights weights;
  InPlaceLayout layout;
  weights.in_place = static_cast<bool>(find_layout(mlp, source, layout));
  if (!weights.in_place) layout = {};
  weights.gate_up = allocate_matrix(arrays, mlp,
                                    {.name = "gate_up",
                                     .parts = mlp.halves(),
                                     .rows = inner,
                                     .cols = hidden,
                                     .has_bias = problem.has_bias,
                                     .factor_columns = experts::gate_up_factor_columns(problem)},
                                    layout.gate_up, weights.view.gate_up);
  weights.down = allocate_matrix(arrays, mlp,
                                 {.name = "down",
                                  .rows = hidden,
                                  .cols = inner,
                                  .has_bias = problem.has_bias && mlp.adds_down_bias,
                                  .factor_columns = experts::down_factor_columns(problem)},
                                 layout.down, weights.view.down);
  if (!is_plain(problem.weight_dtype) && has_input_scale(problem.quant)) {
    weights.static_scales = arrays.floats(2, "static scales");
    weights.view.input_scale = weights.static_scales.as<float>();
    weights.view.intermediate_scale = weights.static_scales.as<float>() + 1;
  }
  return weights;
}

void fill_mlp(const MlpSource& mlp, const WeightSource& source, WeightUpload& upload,
              CudaMlpWeights& weights, const Context& context) {
  if (weights.in_place) {
    // Nothing is copied into the caller's memory: a reload must bring the same tensors.
    InPlaceLayout layout;
    const bool same = find_layout(mlp, source, layout) &&
                      layout.gate_up.data == weights.view.gate_up.data &&
                      layout.down.data == weights.view.down.data;
    if (!same) {
      throw Error(ErrorCode::kState,
                  {.what = "this layer reads its weights where the caller keeps them: an in-place "
                           "reload cannot bring others",
                   .hint = "write them there, or reload with ReloadMode::kStaged"});
    }
  } else {
    fill_matrices(mlp, upload, weights, context);
  }
  fill_biases(mlp, upload, weights);
  fill_scales(mlp, upload, weights);
}

}  // namespace conclave::inline v0
