#include "layer/lent_experts.h"

#include "core/part_spec.h"
#include "core/quant_spec.h"
#include "core/shared_facts.h"
#include "core/weight_types.h"
#include "quant/weight_block.h"

#include <fmt/format.h>

#include <array>
#include <numeric>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr std::array kMatrices = {WeightMatrix::kGate, WeightMatrix::kUp, WeightMatrix::kDown};

// Nothing if there are no such matrices, or check_source will refuse them.
std::optional<WeightInfo> matrices_of(const WeightSource& source, WeightId id, DType dtype,
                                      std::span<const int32_t> experts) {
  const WeightInfo info = source.describe(id);
  if (info.count == 0 || info.dtype != dtype) return std::nullopt;
  for (const int32_t expert : experts) {
    if (expert >= info.count) return std::nullopt;
  }
  return info;
}

Support source_has(const WeightSource& source, WeightMlp mlp, DType dtype,
                   std::span<const int32_t> experts) {
  for (const WeightMatrix matrix : kMatrices) {
    const WeightId id(mlp, matrix);
    const auto info = matrices_of(source, id, dtype, experts);
    if (!info) continue;
    for (const int32_t expert : experts) {
      const ConstTensorView view = source.view(id, expert);
      if (!view.empty() && view.dtype == dtype && view.shape == Shape{info->rows, info->cols}) {
        continue;
      }
      return Support::no(
          fmt::format("packed: the source does not have {} in memory as the layer's "
                      "{}, aligned to its elements",
                      source.locate(id, expert), to_string(dtype)));
    }
  }
  return Support::yes();
}

std::optional<Support> find_part(const WeightSource* source, WeightMlp mlp, DType dtype,
                                 std::span<const int32_t> experts) {
  if (!is_plain(dtype)) {
    return Support::no(
        fmt::format("packed: kernels read codes of {} from panels alone", to_string(dtype)));
  }
  return source == nullptr ? Support::yes() : source_has(*source, mlp, dtype, experts);
}

std::vector<int32_t> first_experts(int64_t count) {
  std::vector<int32_t> experts(static_cast<size_t>(count));
  std::iota(experts.begin(), experts.end(), 0);
  return experts;
}

DType residual_dtype(const MoeSpec& spec) {
  return spec.residual.weight_dtype.value_or(spec.weight_dtype);
}

size_t bytes_of(int64_t count, int64_t hidden, int64_t inner, const ActivationSpec& activation,
                DType dtype) {
  const int64_t matrices = is_gated(activation) ? 3 : 2;
  return static_cast<size_t>(count * matrices * hidden * packed_bytes(dtype, inner));
}

ConstTensorView lent_block(const WeightSource& source, WeightId id, int64_t expert,
                           const WeightBlock& block) {
  const ConstTensorView whole = source.view(id, expert);
  if (!whole.empty()) return block_of_view(whole, block);
  throw Error(
      ErrorCode::kState,
      {.what = "this layer reads its experts where their source has them in memory, and the "
               "source given does not have this matrix there",
       .tensor = source.locate(id, expert),
       .hint = "open the checkpoint so that its files are mapped, or make another layer"});
}

}  // namespace

InPlaceParts find_in_place(const MoeSpec& spec, const LayerOptions& options, const RankPart& part,
                           const WeightSource* source) {
  InPlaceParts parts;
  if (options.weights != WeightUse::kInPlace) return parts;
  parts.routed = find_part(source, WeightMlp::kRouted, spec.weight_dtype, part.local_experts);
  if (!part.holds_dense) return parts;
  if (shared_facts(spec).is_there) {
    parts.shared = find_part(source, WeightMlp::kShared, shared_weight_dtype(spec),
                             first_experts(spec.shared.count));
  }
  if (spec.residual.intermediate_size != 0) {
    parts.residual =
        find_part(source, WeightMlp::kResidual, residual_dtype(spec), first_experts(1));
  }
  return parts;
}

size_t in_place_bytes(const MoeSpec& spec, const RankPart& part, const InPlaceParts& parts) {
  size_t bytes = 0;
  if (InPlaceParts::is(parts.routed)) {
    bytes += bytes_of(static_cast<int64_t>(part.local_experts.size()), expert_width(spec),
                      part.inner.size(), spec.activation, spec.weight_dtype);
  }
  if (InPlaceParts::is(parts.shared)) {
    bytes +=
        bytes_of(spec.shared.count, spec.hidden_size, part.shared_inner.size(),
                 activation_or_routed(spec.shared.activation, spec), shared_weight_dtype(spec));
  }
  if (InPlaceParts::is(parts.residual)) {
    bytes += bytes_of(1, spec.hidden_size, part.residual_inner.size(),
                      activation_or_routed(spec.residual.activation, spec), residual_dtype(spec));
  }
  return bytes;
}

LentExperts lend_experts(const LentMlp& mlp, const WeightSource& source,
                         std::span<const int32_t> source_experts) {
  LentExperts lent;
  lent.matrices.reserve(source_experts.size());
  const auto lend = [&](WeightMatrix matrix, int64_t expert, experts::ExpertMatrix& to) {
    const WeightId id(mlp.mlp, matrix);
    const WeightInfo info = source.describe(id);
    const bool is_down = matrix == WeightMatrix::kDown;
    const WeightBlock block = is_down ? WeightBlock{0, info.rows, mlp.inner.begin, mlp.inner.end}
                                      : WeightBlock{mlp.inner.begin, mlp.inner.end, 0, info.cols};
    to.weights = lent_block(source, id, expert, block);
    if (!mlp.has_bias || (is_down && !mlp.adds_down_bias)) return;
    const WeightId bias = id.with(WeightPlane::kBias);
    Tensor copy(source.describe(bias).dtype, {1, block.row_end - block.row_begin});
    source.read(bias, expert, {0, 1, block.row_begin, block.row_end},
                {copy.as<std::byte>(), copy.size_bytes()});
    lent.biases.push_back(std::move(copy));
    to.bias = lent.biases.back().const_view();
  };
  for (const int32_t expert : source_experts) {
    experts::ExpertMatrices& matrices = lent.matrices.emplace_back();
    if (mlp.gated) lend(WeightMatrix::kGate, expert, matrices.gate);
    lend(WeightMatrix::kUp, expert, matrices.up);
    lend(WeightMatrix::kDown, expert, matrices.down);
  }
  return lent;
}

void check_same_place(const LentExperts& have, const LentExperts& given) {
  for (size_t i = 0; i < have.matrices.size(); ++i) {
    const auto same = [&](const experts::ExpertMatrix& one, const experts::ExpertMatrix& other) {
      return one.weights.data == other.weights.data &&
             one.weights.row_stride == other.weights.row_stride;
    };
    const experts::ExpertMatrices& mine = have.matrices[i];
    const experts::ExpertMatrices& theirs = given.matrices[i];
    if (same(mine.gate, theirs.gate) && same(mine.up, theirs.up) && same(mine.down, theirs.down)) {
      continue;
    }
    throw Error(ErrorCode::kState,
                {.what = "this layer reads its weights where the caller keeps them: an in-place "
                         "reload cannot bring others",
                 .hint = "write them there, or reload with ReloadMode::kStaged"});
  }
}

}  // namespace conclave::inline v0
