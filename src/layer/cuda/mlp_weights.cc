#include "layer/cuda/mlp_weights.h"

#include "core/quant_spec.h"
#include "core/weight_types.h"
#include "experts/cuda/factor_planes.h"
#include "layer/cuda/code_factors.h"
#include "layer/cuda/expert_places.h"
#include "quant/code_meaning.h"
#include "quant/planes.h"

#include "conclave/error.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace conclave::inline v0 {
namespace {

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
