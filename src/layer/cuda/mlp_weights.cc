#include "layer/cuda/mlp_weights.h"

#include "core/checked.h"
#include "core/quant_spec.h"
#include "core/weight_types.h"
#include "experts/cuda/factor_planes.h"
#include "layer/cuda/code_factors.h"
#include "layer/cuda/exact_factors.h"
#include "layer/cuda/expert_places.h"
#include "layer/cuda/row_format.h"
#include "quant/code_meaning.h"
#include "quant/planes.h"

#include "conclave/error.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
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

// Places without a column hold 0, whatever a formula makes of it: their weights are not 0 where
// they belong to a group.
bool scales_activated_columns(const experts::ExpertsProblem& problem) {
  return problem.quant.has_column_factors ||
         (problem.ordered.gate_up != 0 && problem.ordered.down_group != problem.quant.block_cols);
}

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

// Memory for factors of FactorForm::kExact.
void allocate_exact(const DeviceArrays& arrays, const MlpSource& mlp, const MatrixSizes& sizes,
                    CudaMatrixMemory& memory, experts::FactorPlanes& factors) {
  factors.byte_stride = round_up(experts::exact_rows(sizes.rows, sizes.parts), kRowAlignmentBytes);
  memory.factor_scale =
      arrays.make(mlp.count() * exact_bytes(factors), (sizes.name + "_scale").c_str());
  memory.sum_factor = arrays.floats(mlp.count() * sizes.parts, (sizes.name + "_factor").c_str());
  memory.byte_form = arrays.make(int64_t{sizeof(int32_t)}, (sizes.name + "_form").c_str());
  factors.bytes = memory.factor_scale.as();
  factors.byte_form = memory.byte_form.as<int32_t>();
  factors.sum_factors = memory.sum_factor.as<float>();
}

// Memory for scales and zero points in the forms that kernels read: as float32, of blocks as stored
// and else one for each row, or as factors.
void allocate_codes(const DeviceArrays& arrays, const MlpSource& mlp, const MatrixSizes& sizes,
                    CudaMatrixMemory& memory, experts::DeviceExpertMatrix& view) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const bool has_zeros = problem.quant.zeros != WeightZero::kNone;
  if (mlp.forms.floats) {
    const quant::PlaneShape scales = scales_of(problem, sizes);
    memory.num_scales = sizes.parts * scales.rows * scales.cols;
    const int64_t count = mlp.count() * memory.num_scales;
    memory.scale = arrays.floats(count, (sizes.name + "_scale").c_str());
    view.scale = memory.scale.as<float>();
    if (has_zeros) memory.offset = arrays.floats(count, (sizes.name + "_offset").c_str());
    view.offset = memory.offset.as<float>();
  }
  if (mlp.forms.factors) {
    view.factors = factors_of(sizes);
    const experts::FactorForm form = experts::factor_form(problem);
    if (form == experts::FactorForm::kExact) {
      return allocate_exact(arrays, mlp, sizes, memory, view.factors);
    }
    const int64_t count = mlp.count() * numbers_of(view.factors);
    memory.factor_scale = arrays.floats(count, (sizes.name + "_scale").c_str());
    view.factors.scales = memory.factor_scale.as<float>();
    if (experts::code_order(problem) == experts::CodeOrder::kLanesOfNumbers) {
      memory.short_scales = arrays.make(int64_t{sizeof(int32_t)}, (sizes.name + "_short").c_str());
      memory.has_short_scales.assign(static_cast<size_t>(mlp.count()), true);
      view.factors.short_scales = memory.short_scales.as<int32_t>();
    }
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
    view.stride = padded_row(experts::stored_columns(problem, sizes.cols), dtype);
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

// Memory for what makes rows of experts' own, and for down's factors.
void allocate_columns(const DeviceArrays& arrays, const MlpSource& mlp, CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  if (is_plain(problem.weight_dtype)) return;
  const QuantSpec& quant = problem.quant;
  if (!quant.has_column_order && !quant.has_column_factors) return;
  OwnRowTables& own = weights.own_rows;
  own.stride = padded_row(problem.input_columns(), DType::kBF16);
  if (mlp.has(MlpHalf::kGateUp) && quant.has_column_order) {
    own.columns = arrays.make(mlp.count() * own.stride * int64_t{sizeof(int32_t)}, "row columns");
  }
  if (mlp.has(MlpHalf::kGateUp) && quant.has_column_factors) {
    own.factors = arrays.floats(mlp.count() * own.stride, "row factors");
  }
  if (!mlp.has(MlpHalf::kDown) || !scales_activated_columns(problem)) return;
  weights.column_factors =
      arrays.floats(mlp.count() * problem.intermediate_size, "column factors of down");
  weights.view.down.column_factors = weights.column_factors.as<float>();
}

// Places that follow each other.
struct PlaceRun {
  int64_t first = 0;
  int64_t count = 0;
};
std::vector<PlaceRun> runs_of_places(const MlpSource& mlp) {
  std::vector<PlaceRun> runs;
  for (const LocalExpert& expert : mlp.experts) {
    if (runs.empty() || runs.back().first + runs.back().count != expert.place) {
      runs.push_back({.first = expert.place});
    }
    ++runs.back().count;
  }
  return runs;
}

void fill_matrices(const MlpSource& mlp, const std::vector<ExpertPlaces>& places,
                   WeightUpload& upload, CudaMlpWeights& weights, const Context& context) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const DType dtype = problem.weight_dtype;
  const int64_t hidden = problem.hidden_size;
  const int64_t inner = problem.intermediate_size;
  const int64_t gate_up_pitch = packed_bytes(dtype, weights.view.gate_up.stride);
  const int64_t down_pitch = packed_bytes(dtype, weights.view.down.stride);
  const int64_t count = mlp.count();
  const bool has_gate_up = mlp.has(MlpHalf::kGateUp);
  const bool has_down = mlp.has(MlpHalf::kDown);
  int64_t expert_bytes = 0;
  if (has_gate_up) {
    expert_bytes += mlp.gate_up_rows() * packed_bytes(dtype, problem.input_columns());
  }
  if (has_down) expert_bytes += hidden * packed_bytes(dtype, inner);
  for (int64_t index = 0; index < count; ++index) {
    const LocalExpert& expert = mlp.experts[static_cast<size_t>(index)];
    const auto copy = [&](WeightMatrix matrix, std::byte* data, int64_t pitch) {
      const BlockRequest block{.id = expert.id(matrix),
                               .expert = expert.expert,
                               .block = expert.block_of(matrix, hidden)};
      const MatrixPlaces& at = places[static_cast<size_t>(index)].of(matrix);
      const DeviceMatrix place{.data = data, .stride_bytes = pitch};
      if (at.columns.empty()) return upload.copy(block, place);
      upload.copy_placed(block, {.rows = at.rows, .columns = at.columns}, place);
    };
    if (has_gate_up) {
      std::byte* const gate_up =
          weights.gate_up.data.as() + expert.place * mlp.gate_up_rows() * gate_up_pitch;
      if (problem.activation.gated) copy(WeightMatrix::kGate, gate_up, gate_up_pitch);
      copy(WeightMatrix::kUp, gate_up + (mlp.halves() - 1) * inner * gate_up_pitch, gate_up_pitch);
    }
    if (has_down) {
      copy(WeightMatrix::kDown, weights.down.data.as() + expert.place * hidden * down_pitch,
           down_pitch);
    }
    context.progress("uploading experts", (index + 1) * expert_bytes, count * expert_bytes);
  }
  const experts::CodeOrder order = experts::code_order(problem);
  for (const PlaceRun& run : runs_of_places(mlp)) {
    if (has_gate_up) {
      upload.arrange_codes(
          weights.gate_up.data.as() + run.first * mlp.gate_up_rows() * gate_up_pitch,
          run.count * mlp.gate_up_rows(), gate_up_pitch, order);
    }
    if (has_down) {
      upload.arrange_codes(weights.down.data.as() + run.first * hidden * down_pitch,
                           run.count * hidden, down_pitch, order);
    }
  }
}

// Numbers of stored rows [rows, columns] as they lie on the device.
std::vector<float> placed(const std::vector<float>& stored, int64_t columns,
                          std::span<const int32_t> rows, std::span<const int32_t> of_columns) {
  const auto from = [](std::span<const int32_t> list, int64_t index) {
    return list.empty() ? index : int64_t{list[static_cast<size_t>(index)]};
  };
  const int64_t height =
      rows.empty() ? static_cast<int64_t>(stored.size()) / columns : std::ssize(rows);
  const int64_t width = of_columns.empty() ? columns : std::ssize(of_columns);
  std::vector<float> numbers(static_cast<size_t>(height * width));
  for (int64_t row = 0; row < height; ++row) {
    for (int64_t column = 0; column < width; ++column) {
      const int64_t stored_row = from(rows, row);
      const int64_t stored_column = from(of_columns, column);
      if (stored_row < 0 || stored_column < 0) continue;
      numbers[static_cast<size_t>(row * width + column)] =
          stored[static_cast<size_t>(stored_row * columns + stored_column)];
    }
  }
  return numbers;
}

void fill_biases(const MlpSource& mlp, const std::vector<ExpertPlaces>& places,
                 WeightUpload& upload, CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  if (!problem.has_bias) return;
  for (size_t i = 0; i < mlp.experts.size(); ++i) {
    const LocalExpert& expert = mlp.experts[i];
    if (!expert.has_bias) continue;
    const auto copy = [&](WeightMatrix matrix, float* place) {
      const WeightBlock rows = expert.block_of(matrix, problem.hidden_size);
      const quant::PlaneSlice bias = quant::slice({.plane = WeightPlane::kBias}, rows);
      const std::vector<float> stored =
          upload.read_floats({.id = expert.id(matrix, WeightPlane::kBias),
                              .expert = expert.expert,
                              .block = bias.block});
      upload.copy_floats(placed(stored, 1, places[i].of(matrix).rows, {}), place);
    };
    if (mlp.has(MlpHalf::kGateUp)) {
      float* const gate_up = weights.gate_up.bias.as<float>() + expert.place * mlp.gate_up_rows();
      if (problem.activation.gated) copy(WeightMatrix::kGate, gate_up);
      copy(WeightMatrix::kUp, gate_up + (mlp.halves() - 1) * problem.intermediate_size);
    }
    if (!mlp.has(MlpHalf::kDown) || !mlp.adds_down_bias || !expert.has_down_bias) continue;
    copy(WeightMatrix::kDown, weights.down.bias.as<float>() + expert.place * problem.hidden_size);
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
MeaningPlace meaning_place(const CudaMatrixMemory& memory, int64_t place) {
  const int64_t first = place * memory.num_scales;
  return {.scales = memory.scale.as<float>() + first,
          .offsets = memory.offset.empty() ? nullptr : memory.offset.as<float>() + first};
}

void fill_floats(const MlpSource& mlp, const std::vector<ExpertPlaces>& places,
                 WeightUpload& upload, CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  for (size_t i = 0; i < mlp.experts.size(); ++i) {
    const LocalExpert& expert = mlp.experts[i];
    const auto append = [&](WeightMatrix matrix, MeaningPlace& place) {
      CodeMeaning meaning =
          read_meaning(problem.quant, upload.on_host(), expert, matrix, problem.hidden_size);
      const MatrixPlaces& at = places[i].of(matrix);
      if (!at.columns.empty()) {
        meaning.scales = placed(meaning.scales, meaning.groups, at.rows, at.groups);
        if (!meaning.offsets.empty()) {
          meaning.offsets = placed(meaning.offsets, meaning.groups, at.rows, at.groups);
        }
      }
      upload.copy_floats(meaning.scales, place.scales);
      place.scales += meaning.scales.size();
      if (meaning.offsets.empty()) return;
      upload.copy_floats(meaning.offsets, place.offsets);
      place.offsets += meaning.offsets.size();
    };
    if (mlp.has(MlpHalf::kGateUp)) {
      MeaningPlace gate_up = meaning_place(weights.gate_up, expert.place);
      if (problem.activation.gated) append(WeightMatrix::kGate, gate_up);
      append(WeightMatrix::kUp, gate_up);
    }
    if (!mlp.has(MlpHalf::kDown)) continue;
    MeaningPlace down = meaning_place(weights.down, expert.place);
    append(WeightMatrix::kDown, down);
  }
}

// The column of the token's row at each place of the expert's own; it reads gate's or up's, where
// both are there.
std::vector<int32_t> columns_of_row(const ExpertPlaces& places, int64_t stride) {
  std::vector<int32_t> columns(static_cast<size_t>(stride), -1);
  for (const MatrixPlaces* matrix : {&places.gate, &places.up}) {
    for (size_t i = 0; i < matrix->columns.size(); ++i) {
      columns[i] = std::max(columns[i], matrix->columns[i]);
    }
  }
  return columns;
}

// Numbers of columns where `columns` names them; 0 elsewhere.
std::vector<float> numbers_at(const std::vector<float>& numbers,
                              const std::vector<int32_t>& columns) {
  std::vector<float> found(columns.size());
  for (size_t i = 0; i < columns.size(); ++i) {
    if (columns[i] >= 0) found[i] = numbers[static_cast<size_t>(columns[i])];
  }
  return found;
}

// Columns that are there, in their order; then none.
std::vector<int32_t> columns_as_stored(int64_t count, int64_t stride) {
  std::vector<int32_t> columns(static_cast<size_t>(stride), -1);
  std::iota(columns.begin(), columns.begin() + count, 0);
  return columns;
}

void fill_columns(const MlpSource& mlp, const std::vector<ExpertPlaces>& places,
                  WeightUpload& upload, const CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const OwnRowTables& own = weights.own_rows;
  const auto factors_of = [&](const LocalExpert& expert, WeightMatrix matrix) {
    const WeightBlock block = expert.block_of(matrix, problem.hidden_size);
    if (!problem.quant.has_column_factors) {
      return std::vector<float>(static_cast<size_t>(block.col_end - block.col_begin), 1.0F);
    }
    return load_column_factors(problem.quant, upload.on_host(), expert.id(matrix), expert.expert,
                               block);
  };
  for (size_t i = 0; i < mlp.experts.size(); ++i) {
    const LocalExpert& expert = mlp.experts[i];
    const int64_t index = expert.place;
    const std::vector<int32_t> columns = places[i].up.columns.empty()
                                             ? columns_as_stored(problem.hidden_size, own.stride)
                                             : columns_of_row(places[i], own.stride);
    if (mlp.has(MlpHalf::kGateUp) && !own.columns.empty()) {
      upload.copy_ints(columns, own.columns.as<int32_t>() + index * own.stride);
    }
    if (mlp.has(MlpHalf::kGateUp) && !own.factors.empty()) {
      upload.copy_floats(numbers_at(factors_of(expert, WeightMatrix::kUp), columns),
                         own.factors.as<float>() + index * own.stride);
    }
    if (!mlp.has(MlpHalf::kDown) || weights.column_factors.empty()) continue;
    const int64_t inner = problem.intermediate_size;
    const std::vector<int32_t>& ordered = places[i].down.columns;
    upload.copy_floats(numbers_at(factors_of(expert, WeightMatrix::kDown),
                                  ordered.empty() ? columns_as_stored(inner, inner) : ordered),
                       weights.column_factors.as<float>() + index * inner);
  }
}

void fill_scales(const MlpSource& mlp, const std::vector<ExpertPlaces>& places,
                 WeightUpload& upload, CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  if (is_plain(problem.weight_dtype)) return;
  if (mlp.forms.floats) fill_floats(mlp, places, upload, weights);
  if (mlp.forms.factors) fill_factors(mlp, places, upload, weights);
  if (weights.own_rows.stride != 0) fill_columns(mlp, places, upload, weights);
  if (!mlp.experts.empty() && has_input_scale(problem.quant)) {
    const StaticScales steps = load_static_scales(upload.on_host(), mlp.experts.front().mlp);
    auto* const place = weights.static_scales.as<float>();
    if (mlp.has(MlpHalf::kGateUp)) upload.copy_floats({steps.input}, place);
    if (mlp.has(MlpHalf::kDown)) upload.copy_floats({steps.intermediate}, place + 1);
  }
}

}  // namespace

CudaMlpWeights allocate_mlp(const DeviceArrays& arrays, const MlpSource& mlp,
                            const WeightSource* lender) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const int64_t hidden = problem.hidden_size;
  const int64_t inner = problem.intermediate_size;
  CudaMlpWeights weights;
  InPlaceLayout layout;
  weights.in_place = lender != nullptr && find_layout(mlp, *lender, layout);
  if (!weights.in_place) layout = {};
  if (mlp.has(MlpHalf::kGateUp)) {
    weights.gate_up = allocate_matrix(arrays, mlp,
                                      {.name = "gate_up",
                                       .parts = mlp.halves(),
                                       .rows = inner,
                                       .cols = problem.input_columns(),
                                       .has_bias = problem.has_bias,
                                       .factor_columns = experts::gate_up_factor_columns(problem)},
                                      layout.gate_up, weights.view.gate_up);
  }
  if (mlp.has(MlpHalf::kDown)) {
    weights.down = allocate_matrix(arrays, mlp,
                                   {.name = "down",
                                    .rows = hidden,
                                    .cols = inner,
                                    .has_bias = problem.has_bias && mlp.adds_down_bias,
                                    .factor_columns = experts::down_factor_columns(problem)},
                                   layout.down, weights.view.down);
  }
  allocate_columns(arrays, mlp, weights);
  if (!is_plain(problem.weight_dtype) && has_input_scale(problem.quant)) {
    weights.static_scales = arrays.floats(2, "static scales");
    weights.view.input_scale = weights.static_scales.as<float>();
    weights.view.intermediate_scale = weights.static_scales.as<float>() + 1;
  }
  return weights;
}

// Nothing is copied into the caller's memory.
void check_lent(const MlpSource& mlp, const WeightSource& source, const CudaMlpWeights& weights) {
  InPlaceLayout layout;
  const bool same = find_layout(mlp, source, layout) &&
                    layout.gate_up.data == weights.view.gate_up.data &&
                    layout.down.data == weights.view.down.data;
  if (same) return;
  throw Error(ErrorCode::kState,
              {.what = "this layer reads its weights where the caller keeps them: an in-place "
                       "reload cannot bring others",
               .hint = "write them there, or reload with ReloadMode::kStaged"});
}

void fill_mlp(const MlpSource& mlp, const WeightSource& source, WeightUpload& upload,
              CudaMlpWeights& weights, const Context& context) {
  std::vector<ExpertPlaces> places;
  for (const LocalExpert& expert : mlp.experts) {
    places.push_back(places_of(mlp, expert, upload.on_host()));
  }
  if (weights.in_place) {
    check_lent(mlp, source, weights);
  } else {
    fill_matrices(mlp, places, upload, weights, context);
  }
  fill_biases(mlp, places, upload, weights);
  fill_scales(mlp, places, upload, weights);
}

}  // namespace conclave::inline v0
