#include "layer/cuda/mlp_weights.h"

#include "core/quant_spec.h"
#include "core/weight_types.h"
#include "experts/cuda/factor_planes.h"
#include "layer/cuda/code_factors.h"
#include "layer/cuda/expert_places.h"
#include "layer/known_codes.h"
#include "quant/code_meaning.h"
#include "quant/planes.h"

#include "conclave/error.h"

#include <algorithm>
#include <atomic>
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

// A matrix, or rows of it that one thread copies.
struct MatrixPart {
  BlockRequest block;
  DeviceMatrix place;
  const MatrixPlaces* codes = nullptr;  // null: as they are stored
  int64_t bytes = 0;
};

// Threads share large matrices; a part is a copy from a device or pinned memory, or a few through
// pinned memory.
constexpr int64_t kPartBytes = int64_t{4} << 20;

// Adds the parts of a matrix; codes that get other places stay together.
void add_parts(const MatrixPart& whole, int64_t row_bytes, std::vector<MatrixPart>& parts) {
  const WeightBlock& all = whole.block.block;
  const int64_t most = whole.codes != nullptr
                           ? std::max<int64_t>(all.row_end - all.row_begin, 1)
                           : std::max<int64_t>(kPartBytes / std::max<int64_t>(row_bytes, 1), 1);
  for (int64_t row = all.row_begin; row < all.row_end; row += most) {
    MatrixPart part = whole;
    part.block.block.row_begin = row;
    part.block.block.row_end = std::min(row + most, all.row_end);
    part.place.data += (row - all.row_begin) * whole.place.stride_bytes;
    part.bytes = (part.block.block.row_end - row) * row_bytes;
    parts.push_back(part);
  }
}

std::vector<MatrixPart> parts_of(const MlpSource& mlp, const std::vector<ExpertPlaces>& places,
                                 const CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const DType dtype = problem.weight_dtype;
  const int64_t hidden = problem.hidden_size;
  const int64_t gate_up_pitch = packed_bytes(dtype, weights.view.gate_up.stride);
  const int64_t down_pitch = packed_bytes(dtype, weights.view.down.stride);
  std::vector<MatrixPart> parts;
  for (size_t index = 0; index < mlp.experts.size(); ++index) {
    const LocalExpert& expert = mlp.experts[index];
    const auto add = [&](WeightMatrix matrix, std::byte* data, int64_t pitch) {
      const WeightBlock block = expert.block_of(matrix, hidden);
      const MatrixPlaces& at = places[index].of(matrix);
      add_parts({.block = {.id = expert.id(matrix), .expert = expert.expert, .block = block},
                 .place = {.data = data, .stride_bytes = pitch},
                 .codes = at.columns.empty() ? nullptr : &at},
                packed_bytes(dtype, block.col_end - block.col_begin), parts);
    };
    if (mlp.has(MlpHalf::kGateUp)) {
      std::byte* const gate_up =
          weights.gate_up.data.as() + expert.place * mlp.gate_up_rows() * gate_up_pitch;
      if (problem.activation.gated) add(WeightMatrix::kGate, gate_up, gate_up_pitch);
      add(WeightMatrix::kUp,
          gate_up + (mlp.halves() - 1) * problem.intermediate_size * gate_up_pitch, gate_up_pitch);
    }
    if (!mlp.has(MlpHalf::kDown)) continue;
    add(WeightMatrix::kDown, weights.down.data.as() + expert.place * hidden * down_pitch,
        down_pitch);
  }
  return parts;
}

void arrange_codes(const MlpSource& mlp, WeightUpload& upload, const CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const DType dtype = problem.weight_dtype;
  const experts::CodeOrder order = experts::code_order(problem);
  const auto arrange = [&](const PlaceRun& run, const DeviceMemory& memory, int64_t rows,
                           int64_t stride) {
    const int64_t pitch = packed_bytes(dtype, stride);
    upload.arrange_codes(memory.as() + run.first * rows * pitch, run.count * rows, pitch, order);
  };
  for (const PlaceRun& run : runs_of_places(mlp)) {
    if (mlp.has(MlpHalf::kGateUp)) {
      arrange(run, weights.gate_up.data, mlp.gate_up_rows(), weights.view.gate_up.stride);
    }
    if (mlp.has(MlpHalf::kDown)) {
      arrange(run, weights.down.data, problem.hidden_size, weights.view.down.stride);
    }
  }
}

void fill_matrices(const MlpSource& mlp, const std::vector<ExpertPlaces>& places,
                   UploadLanes& lanes, CudaMlpWeights& weights, const Context& context) {
  const std::vector<MatrixPart> parts = parts_of(mlp, places, weights);
  int64_t all_bytes = 0;
  for (const MatrixPart& part : parts) all_bytes += part.bytes;
  const bool is_placed =
      std::ranges::any_of(parts, [](const MatrixPart& part) { return part.codes != nullptr; });
  const experts::ExpertsProblem& problem = mlp.problem;
  const bool are_narrower = experts::code_bits(problem) < bit_size(problem.weight_dtype);
  std::atomic<int64_t> done{0};
  lanes.for_each(
      std::ssize(parts),
      [&](WeightUpload& lane) {
        return [&](int64_t index) {
          const MatrixPart& part = parts[static_cast<size_t>(index)];
          if (are_narrower) {
            const KnownCodes known(problem.weight_dtype, problem.quant, *part.block.id.matrix());
            lane.copy_known(part.block, known, part.place);
          } else if (part.codes == nullptr) {
            lane.copy(part.block, part.place);
          } else {
            lane.copy_placed(part.block, {.rows = part.codes->rows, .columns = part.codes->columns},
                             part.place);
          }
          context.progress("uploading experts", done.fetch_add(part.bytes) + part.bytes, all_bytes);
        };
      },
      are_narrower || is_placed || parts.empty() ? LanesUsed::kAll
                                                 : lanes.used_for(parts.front().block));
  arrange_codes(mlp, lanes.own(), weights);
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

void fill_floats(const MlpSource& mlp, const std::vector<ExpertPlaces>& places, UploadLanes& lanes,
                 const CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  lanes.for_each(mlp.count(), [&](WeightUpload& lane) {
    return [&](int64_t index) {
      const auto i = static_cast<size_t>(index);
      const LocalExpert& expert = mlp.experts[i];
      const auto append = [&](WeightMatrix matrix, MeaningPlace& place) {
        CodeMeaning meaning =
            read_meaning(problem.quant, lane.on_host(), expert, matrix, problem.hidden_size);
        const MatrixPlaces& at = places[i].of(matrix);
        if (!at.columns.empty()) {
          meaning.scales = placed(meaning.scales, meaning.groups, at.rows, at.groups);
          if (!meaning.offsets.empty()) {
            meaning.offsets = placed(meaning.offsets, meaning.groups, at.rows, at.groups);
          }
        }
        lane.copy_floats(meaning.scales, place.scales);
        place.scales += meaning.scales.size();
        if (meaning.offsets.empty()) return;
        lane.copy_floats(meaning.offsets, place.offsets);
        place.offsets += meaning.offsets.size();
      };
      if (mlp.has(MlpHalf::kGateUp)) {
        MeaningPlace gate_up = meaning_place(weights.gate_up, expert.place);
        if (problem.activation.gated) append(WeightMatrix::kGate, gate_up);
        append(WeightMatrix::kUp, gate_up);
      }
      if (!mlp.has(MlpHalf::kDown)) return;
      MeaningPlace down = meaning_place(weights.down, expert.place);
      append(WeightMatrix::kDown, down);
    };
  });
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
    if (!mlp.has(MlpHalf::kDown)) continue;
    const int64_t inner = problem.intermediate_size;
    const std::vector<int32_t>& ordered = places[i].down.columns;
    if (!weights.inner_columns.empty()) {
      upload.copy_ints(ordered, weights.inner_columns.as<int32_t>() + index * inner);
    }
    if (weights.column_factors.empty()) continue;
    upload.copy_floats(numbers_at(factors_of(expert, WeightMatrix::kDown),
                                  ordered.empty() ? columns_as_stored(inner, inner) : ordered),
                       weights.column_factors.as<float>() + index * inner);
  }
}

void fill_scales(const MlpSource& mlp, const std::vector<ExpertPlaces>& places, UploadLanes& lanes,
                 CudaMlpWeights& weights, const Context& context) {
  const experts::ExpertsProblem& problem = mlp.problem;
  if (is_plain(problem.weight_dtype)) return;
  if (mlp.forms.floats) fill_floats(mlp, places, lanes, weights);
  if (mlp.forms.factors) fill_factors(mlp, places, lanes, weights, context);
  if (weights.own_rows.stride != 0) fill_columns(mlp, places, lanes.own(), weights);
  // Experts may come to places that are all free yet.
  if (mlp.places() > 0 && has_input_scale(problem.quant)) {
    WeightUpload& upload = lanes.own();
    const WeightMlp kind = mlp.experts.empty() ? WeightMlp::kRouted : mlp.experts.front().mlp;
    const StaticScales steps = load_static_scales(upload.on_host(), kind);
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

void fill_mlp(const MlpSource& mlp, const WeightSource& source, UploadLanes& lanes,
              CudaMlpWeights& weights, const Context& context) {
  std::vector<ExpertPlaces> places;
  for (const LocalExpert& expert : mlp.experts) {
    places.push_back(places_of(mlp, expert, lanes.own().on_host()));
  }
  if (weights.in_place) {
    check_lent(mlp, source, weights);
  } else {
    fill_matrices(mlp, places, lanes, weights, context);
  }
  fill_biases(mlp, places, lanes.own(), weights);
  fill_scales(mlp, places, lanes, weights, context);
}

}  // namespace conclave::inline v0
