#include "layer/pack_mlp.h"

#include "core/located.h"
#include "core/weight_types.h"
#include "cpu/parallel.h"
#include "layer/known_codes.h"
#include "quant/code_meaning.h"
#include "quant/planes.h"
#include "quant/weight_block.h"

#include "conclave/error.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

// Most matrices fit in one part: a source that stores them transposed reads its lines once per
// part.
constexpr int64_t kMostPartBytes = int64_t{32} << 20;

constexpr std::array kMatrices = {WeightMatrix::kGate, WeightMatrix::kUp, WeightMatrix::kDown};

// Rows of one expert that are read and packed together. Rows of gate and up count from the rank's
// first.
struct ExpertPart {
  int64_t inner_begin = 0;
  int64_t inner_end = 0;
  int64_t hidden_begin = 0;
  int64_t hidden_end = 0;
};

struct MlpSizes {
  int64_t hidden = 0;
  int64_t inner = 0;            // intermediate columns of this rank
  int64_t inner_row_bytes = 0;  // gate and up together
  int64_t down_row_bytes = 0;
};

MlpSizes sizes_of(const MlpWeights& mlp, const WeightSource& source) {
  const WeightInfo info =
      source.describe({mlp.mlp, mlp.packs_down ? WeightMatrix::kDown : WeightMatrix::kUp});
  const int64_t hidden = mlp.packs_down ? info.rows : info.cols;
  return {.hidden = hidden,
          .inner = mlp.inner.size(),
          .inner_row_bytes = (mlp.gated ? 2 : 1) * packed_bytes(info.dtype, hidden),
          .down_row_bytes = packed_bytes(info.dtype, mlp.inner.size())};
}

// The largest number of whole granules of rows that fits, at least one granule.
int64_t rows_per_part(int64_t row_bytes, int64_t granule, int64_t part_bytes) {
  const int64_t fitting = part_bytes / std::max<int64_t>(row_bytes, 1);
  return std::max<int64_t>(fitting / granule, 1) * granule;
}

std::vector<ExpertPart> cut_expert(const MlpWeights& mlp, const MlpSizes& sizes,
                                   int64_t part_bytes) {
  const experts::PackGranule granule = mlp.kernel.pack_granule();
  std::vector<ExpertPart> parts;
  const int64_t inner_rows = rows_per_part(sizes.inner_row_bytes, granule.inner_rows, part_bytes);
  for (int64_t row = 0; mlp.packs_gate_up && row < sizes.inner; row += inner_rows) {
    parts.push_back({.inner_begin = row, .inner_end = std::min(row + inner_rows, sizes.inner)});
  }
  const int64_t hidden_rows = rows_per_part(sizes.down_row_bytes, granule.hidden_rows, part_bytes);
  for (int64_t row = 0; mlp.packs_down && row < sizes.hidden; row += hidden_rows) {
    parts.push_back({.hidden_begin = row, .hidden_end = std::min(row + hidden_rows, sizes.hidden)});
  }
  return parts;
}

// The meaning of the codes of a block's rows, and views of it, are empty for plain matrices and for
// those not asked for. The order and factors of columns come with the first rows.
struct BlockMeaning {
  BlockMeaning(const MlpWeights& mlp, const WeightSource& source, const BlockRequest& request,
               bool has_first_row) {
    if (mlp.quant == nullptr || !request.wanted) return;
    const int64_t rows = request.block.row_end - request.block.row_begin;
    if (rows == 0) return;
    meaning = load_meaning(*mlp.quant, source, request.id, request.expert, request.block);
    const KnownCodes known(source.describe(request.id).dtype, *mlp.quant, *request.id.matrix());
    known.narrow({source, request.id, request.expert, request.block}, meaning);
    const auto numbers = [&](const std::vector<float>& values) {
      if (values.empty()) return ConstTensorView{};
      return ConstTensorView{.data = values.data(), .shape = {rows, meaning.groups}};
    };
    scale = numbers(meaning.scales);
    offset = numbers(meaning.offsets);
    if (!has_first_row) return;
    const auto columns = [](const auto& table, DType dtype) {
      if (table.empty()) return ConstTensorView{};
      return ConstTensorView{
          .data = table.data(), .dtype = dtype, .shape = {1, static_cast<int64_t>(table.size())}};
    };
    order = columns(meaning.order, DType::kI32);
    factor = columns(meaning.factors, DType::kF32);
  }
  CodeMeaning meaning;
  ConstTensorView scale = {};
  ConstTensorView offset = {};
  ConstTensorView order = {};
  ConstTensorView factor = {};
};

void pack_part(const MlpWeights& mlp, const ExpertPart& part, int64_t source_expert, size_t local,
               const MlpSizes& sizes, const WeightSource& source, BlockLoader& loader) {
  const int64_t first = mlp.inner.begin + part.inner_begin;
  const int64_t last = mlp.inner.begin + part.inner_end;
  const bool has_inner = part.inner_begin < part.inner_end;
  const bool has_hidden = part.hidden_begin < part.hidden_end;
  const WeightBlock inner_rows{first, last, 0, sizes.hidden};
  const WeightBlock down_rows{part.hidden_begin, part.hidden_end, mlp.inner.begin, mlp.inner.end};
  std::array<BlockRequest, 2 * kMatrices.size()> requests;
  for (size_t i = 0; i < kMatrices.size(); ++i) {
    const WeightId id(mlp.mlp, kMatrices[i]);
    const bool is_down = kMatrices[i] == WeightMatrix::kDown;
    const WeightBlock& block = is_down ? down_rows : inner_rows;
    const bool is_there = kMatrices[i] != WeightMatrix::kGate || mlp.gated;
    const bool wanted = is_there && (is_down ? has_hidden : has_inner);
    const bool biased = wanted && mlp.has_bias && (!is_down || mlp.adds_down_bias);
    requests[i] = {id, source_expert, block, wanted};
    requests[kMatrices.size() + i] = {id.with(WeightPlane::kBias), source_expert,
                                      quant::slice({.plane = WeightPlane::kBias}, block).block,
                                      biased};
  }
  std::array<ConstTensorView, requests.size()> views;
  loader.load(requests, views);
  std::array<std::vector<std::byte>, kMatrices.size()> narrowed;
  for (size_t i = 0; i < kMatrices.size(); ++i) {
    if (mlp.quant == nullptr || views[i].empty()) continue;
    const KnownCodes known(views[i].dtype, *mlp.quant, kMatrices[i]);
    if (!known.has_fewer_bits()) continue;
    const ConstTensorView narrow = known.narrow(
        views[i], {source, requests[i].id, source_expert, requests[i].block}, narrowed[i]);
    // Others are checked alone.
    if (known.has_panels()) views[i] = narrow;
  }
  const std::array meanings = {BlockMeaning(mlp, source, requests[0], part.inner_begin == 0),
                               BlockMeaning(mlp, source, requests[1], part.inner_begin == 0),
                               BlockMeaning(mlp, source, requests[2], part.hidden_begin == 0)};
  const auto matrix = [&](size_t i) {
    return experts::ExpertMatrix{.weights = views[i],
                                 .bias = views[kMatrices.size() + i],
                                 .scale = meanings[i].scale,
                                 .offset = meanings[i].offset,
                                 .order = meanings[i].order,
                                 .factor = meanings[i].factor};
  };

  const experts::PackGranule granule = mlp.kernel.pack_granule();
  const auto gate_up_panel = static_cast<size_t>(part.inner_begin / granule.inner_rows);
  const auto down_panel = static_cast<size_t>(part.hidden_begin / granule.hidden_rows);
  try {
    mlp.kernel.pack({.gate = matrix(0), .up = matrix(1), .down = matrix(2)},
                    mlp.gate_up[local] + gate_up_panel * granule.gate_up_bytes,
                    mlp.down[local] + down_panel * granule.down_bytes);
  } catch (const Error& error) {
    // Parts have rows of gate and up, or of down.
    const WeightId id = requests[has_inner ? 1 : 2].id;
    const std::string place = source.locate(id.with(WeightPlane::kScale), source_expert);
    throw Error(error.code(), located(place, error.detail()));
  }
}

}  // namespace

void pack_experts(const Context& context, Executor& executor, const MlpWeights& mlp,
                  const WeightSource& source, std::span<const int32_t> source_experts,
                  size_t scratch_bytes) {
  const int32_t workers = executor.concurrency();
  const MlpSizes sizes = sizes_of(mlp, source);
  // Codes of fewer bits are a second copy, of three quarters of the size at most.
  const bool has_narrow_codes =
      mlp.quant != nullptr && (mlp.quant->gate_up_codes.dtype || mlp.quant->down_codes.dtype);
  const int64_t scratch = static_cast<int64_t>(scratch_bytes) / workers;
  const int64_t part_bytes = std::min(kMostPartBytes, has_narrow_codes ? scratch / 7 * 4 : scratch);
  const std::vector<ExpertPart> parts = cut_expert(mlp, sizes, part_bytes);
  std::vector<BlockLoader> loaders;
  loaders.reserve(static_cast<size_t>(workers));
  for (int32_t worker = 0; worker < workers; ++worker) loaders.emplace_back(source);

  const auto num_parts = static_cast<int64_t>(parts.size());
  const int64_t total = num_parts * static_cast<int64_t>(source_experts.size());
  const auto part_total_bytes = [&](const ExpertPart& part) {
    return (part.inner_end - part.inner_begin) * sizes.inner_row_bytes +
           (part.hidden_end - part.hidden_begin) * sizes.down_row_bytes;
  };
  const int64_t total_bytes =
      std::ranges::count_if(source_experts, [](int32_t expert) { return expert >= 0; }) *
      (sizes.inner * sizes.inner_row_bytes + sizes.hidden * sizes.down_row_bytes);
  std::atomic<int64_t> bytes_done{0};
  cpu::parallel_for_throwing(executor, total, 1, [&](int64_t begin, int64_t end, int32_t worker) {
    for (int64_t item = begin; item < end; ++item) {
      const auto local = static_cast<size_t>(item / num_parts);
      if (source_experts[local] < 0) continue;
      const ExpertPart& part = parts[static_cast<size_t>(item % num_parts)];
      pack_part(mlp, part, source_experts[local], local, sizes, source,
                loaders[static_cast<size_t>(worker)]);
      if (mlp.progress_phase.empty()) continue;
      const int64_t bytes = part_total_bytes(part);
      context.progress(mlp.progress_phase, bytes_done.fetch_add(bytes) + bytes, total_bytes);
    }
  });
}

void check_meanings(Executor& executor, const MlpWeights& mlp, const WeightSource& source,
                    std::span<const int32_t> source_experts) {
  if (mlp.quant == nullptr) return;
  const auto check = [&](WeightMatrix matrix, int64_t expert) {
    const WeightId id(mlp.mlp, matrix);
    const WeightInfo info = source.describe(id);
    const bool is_down = matrix == WeightMatrix::kDown;
    const WeightBlock block = is_down ? WeightBlock{0, info.rows, mlp.inner.begin, mlp.inner.end}
                                      : WeightBlock{mlp.inner.begin, mlp.inner.end, 0, info.cols};
    if (block.row_begin == block.row_end) return;
    const KnownCodes known(info.dtype, *mlp.quant, matrix);
    if (!known.has_fewer_numbers()) return check_meaning(*mlp.quant, source, id, expert, block);
    CodeMeaning meaning = load_meaning(*mlp.quant, source, id, expert, block);
    known.narrow({source, id, expert, block}, meaning);
  };
  const auto count = static_cast<int64_t>(source_experts.size());
  cpu::parallel_for_throwing(executor, count, 1, [&](int64_t begin, int64_t end, int32_t) {
    for (int64_t item = begin; item < end; ++item) {
      const int32_t expert = source_experts[static_cast<size_t>(item)];
      if (expert < 0) continue;
      for (const WeightMatrix matrix : kMatrices) {
        const bool is_down = matrix == WeightMatrix::kDown;
        if (matrix == WeightMatrix::kGate && !mlp.gated) continue;
        if (is_down ? mlp.packs_down : mlp.packs_gate_up) check(matrix, expert);
      }
    }
  });
}

}  // namespace conclave::inline v0
