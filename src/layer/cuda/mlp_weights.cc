#include "layer/cuda/mlp_weights.h"

#include "core/quant_spec.h"
#include "core/weight_types.h"
#include "layer/cuda/row_format.h"
#include "quant/code_meaning.h"
#include "quant/planes.h"

#include "conclave/error.h"

#include <string>

namespace conclave::inline v0 {
namespace {

// Kernels may read this many rows beyond the last expert, but never use them.
constexpr int64_t kSlackRows = 64;

// Scales of one matrix [rows, cols] as kernels read them: of blocks as stored, otherwise one for
// each row.
int64_t scale_count(const experts::ExpertsProblem& problem, int64_t rows, int64_t cols) {
  if (is_plain(problem.weight_dtype)) return 0;
  if (problem.quant.weights != WeightScale::kBlock) return rows;
  const quant::PlaneShape plane =
      quant::plane_of(WeightPlane::kScale, problem.weight_dtype, problem.quant, rows, cols);
  return plane.rows * plane.cols;
}

// Sizes of an expert's part of gate_up or of down.
struct MatrixSizes {
  std::string name;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t scales = 0;  // 0: it holds no codes
  bool has_bias = false;
};

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
    memory.data = arrays.make((count * sizes.rows + kSlackRows) * packed_bytes(dtype, view.stride),
                              sizes.name.c_str());
    view.data = memory.data.as();
  }
  const auto floats = [&](int64_t each, const char* what, const float*& seen) {
    DeviceMemory own = arrays.floats(count * each, (sizes.name + what).c_str());
    seen = own.as<float>();
    return own;
  };
  if (sizes.has_bias) memory.bias = floats(sizes.rows, "_bias", view.bias);
  if (sizes.scales == 0) return memory;
  memory.scale = floats(sizes.scales, "_scale", view.scale);
  if (problem.quant.zeros != WeightZero::kNone) {
    memory.offset = floats(sizes.scales, "_offset", view.offset);
  }
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

// Places for what is copied next.
struct MeaningPlace {
  float* scales = nullptr;
  float* offsets = nullptr;
};

void fill_scales(const MlpSource& mlp, WeightUpload& upload, CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  if (is_plain(problem.weight_dtype)) return;
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
                                     .rows = mlp.gate_up_rows(),
                                     .cols = hidden,
                                     .scales = mlp.halves() * scale_count(problem, inner, hidden),
                                     .has_bias = problem.has_bias},
                                    layout.gate_up, weights.view.gate_up);
  weights.down = allocate_matrix(arrays, mlp,
                                 {.name = "down",
                                  .rows = hidden,
                                  .cols = inner,
                                  .scales = scale_count(problem, hidden, inner),
                                  .has_bias = problem.has_bias && mlp.adds_down_bias},
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
