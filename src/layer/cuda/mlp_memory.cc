#include "core/checked.h"
#include "core/quant_spec.h"
#include "core/weight_types.h"
#include "experts/cuda/factor_planes.h"
#include "layer/cuda/code_factors.h"
#include "layer/cuda/exact_factors.h"
#include "layer/cuda/mlp_weights.h"
#include "layer/cuda/row_format.h"
#include "quant/planes.h"

#include <cstdint>
#include <string>

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

// Memory for what all experts' scales are known to be.
void allocate_short(const DeviceArrays& arrays, const MlpSource& mlp, const MatrixSizes& sizes,
                    CudaMatrixMemory& memory, experts::FactorPlanes& factors) {
  memory.short_scales = arrays.make(int64_t{sizeof(int32_t)}, (sizes.name + "_short").c_str());
  memory.has_short_scales.assign(static_cast<size_t>(mlp.places()), uint8_t{1});
  factors.short_scales = memory.short_scales.as<int32_t>();
}

// Memory for factors that are steps.
void allocate_steps(const DeviceArrays& arrays, const MlpSource& mlp, const MatrixSizes& sizes,
                    CudaMatrixMemory& memory, experts::FactorPlanes& factors) {
  const experts::FactorForm form = experts::factor_form(mlp.problem);
  const int64_t words = experts::step_words(form, factors.groups);
  factors.units = ceil_div(factors.groups, experts::groups_of_unit(mlp.problem));
  const int64_t rows_of_all = mlp.places() * factors.parts * factors.row_stride;
  memory.factor_scale = arrays.make(rows_of_all * words * experts::bytes_of_step_word(form),
                                    (sizes.name + "_scale").c_str());
  memory.step_units = arrays.make(rows_of_all * factors.units * experts::bytes_of_step_unit(form),
                                  (sizes.name + "_unit").c_str());
  // All small ones are.
  const bool may_be_short =
      experts::multiplies_steps(mlp.problem) && form != experts::FactorForm::kSmallSteps;
  if (may_be_short) allocate_short(arrays, mlp, sizes, memory, factors);
  factors.steps = memory.factor_scale.as();
  factors.step_units = memory.step_units.as();
}

// Memory for factors of FactorForm::kExact.
void allocate_exact(const DeviceArrays& arrays, const MlpSource& mlp, const MatrixSizes& sizes,
                    CudaMatrixMemory& memory, experts::FactorPlanes& factors) {
  factors.byte_stride = round_up(experts::exact_rows(sizes.rows, sizes.parts), kRowAlignmentBytes);
  memory.factor_scale =
      arrays.make(mlp.places() * exact_bytes(factors), (sizes.name + "_scale").c_str());
  memory.sum_factor = arrays.floats(mlp.places() * sizes.parts, (sizes.name + "_factor").c_str());
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
    const int64_t count = mlp.places() * memory.num_scales;
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
    if (experts::has_steps(form)) {
      return allocate_steps(arrays, mlp, sizes, memory, view.factors);
    }
    const int64_t count = mlp.places() * numbers_of(view.factors);
    memory.factor_scale = arrays.floats(count, (sizes.name + "_scale").c_str());
    view.factors.scales = memory.factor_scale.as<float>();
    if (experts::code_order(problem) == experts::CodeOrder::kLanesOfNumbers) {
      allocate_short(arrays, mlp, sizes, memory, view.factors);
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
  const int64_t count = mlp.places();
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
    own.columns = arrays.make(mlp.places() * own.stride * int64_t{sizeof(int32_t)}, "row columns");
  }
  if (mlp.has(MlpHalf::kGateUp) && quant.has_column_factors) {
    own.factors = arrays.floats(mlp.places() * own.stride, "row factors");
  }
  if (!mlp.has(MlpHalf::kDown)) return;
  if (quant.has_column_order) {
    weights.inner_columns = arrays.make(
        mlp.places() * problem.intermediate_size * int64_t{sizeof(int32_t)}, "inner columns");
  }
  if (!scales_activated_columns(problem)) return;
  weights.column_factors =
      arrays.floats(mlp.places() * problem.intermediate_size, "column factors of down");
  weights.view.down.column_factors = weights.column_factors.as<float>();
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

}  // namespace conclave::inline v0
