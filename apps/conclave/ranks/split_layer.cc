#include "ranks/split_layer.h"

#include "interrupt.h"

#include <algorithm>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave::tool {
namespace {

Shape with_rows(const Shape& shape, int64_t rows) {
  std::vector<int64_t> dims(shape.dims().begin(), shape.dims().end());
  dims.front() = rows;
  return Shape(std::span<const int64_t>(dims));
}

ConstTensorView rows_of(const ConstTensorView& view, RowRange range) {
  if (view.empty()) return view;
  ConstTensorView part = view;
  const auto rows = static_cast<size_t>(std::max<int64_t>(view.shape[0], 1));
  const size_t row_bytes = dense_bytes(view.dtype, view.shape) / rows;
  part.data =
      static_cast<const std::byte*>(view.data) + static_cast<size_t>(range.begin) * row_bytes;
  part.shape = with_rows(view.shape, range.size());
  return part;
}

LayerInput share_of(const LayerInput& input, const RankTeam& team) {
  const RowRange range = team.share_of(input.num_tokens());
  std::vector<int64_t> rank_tokens;
  for (int32_t rank = 0; rank < team.size(); rank += team.tp_size()) {
    rank_tokens.push_back(team.share_of(input.num_tokens(), rank).size());
  }
  return {.hidden = rows_of(input.hidden, range),
          .router_logits = rows_of(input.router_logits, range),
          .topk_ids = rows_of(input.topk_ids, range),
          .topk_weights = rows_of(input.topk_weights, range),
          .router_input = rows_of(input.router_input, range),
          .residual_input = rows_of(input.residual_input, range),
          .token_ids = rows_of(input.token_ids, range),
          .top_k = input.top_k,
          .banned_experts = input.banned_experts,
          .expert_budget = input.expert_budget,
          .adapter = input.adapter,
          .rank_tokens = std::move(rank_tokens)};
}

constexpr std::string_view kGatherPhase = "gather the results";

void gather(const RankTeam& team, int64_t num_tokens, Tensor& tensor) {
  Tensor all;
  if (team.leads()) {
    all = Tensor(tensor.dtype(), with_rows(tensor.shape(), num_tokens));
  }
  team.gather_rows({tensor.as<std::byte>(), tensor.size_bytes()},
                   {all.as<std::byte>(), all.size_bytes()}, num_tokens, kGatherPhase);
  if (team.leads()) tensor = std::move(all);
}

// Weights of a large layer take minutes.
MoeLayer load(const SplitLayer& split) {
  const InterruptScope interrupt;
  return MoeLayer::create(split.context, split.spec, split.source, split.options,
                          split.team.parallel());
}

}  // namespace

LayerRun run_split_layer(const SplitLayer& split, const LayerInput& input, int32_t repetitions) {
  const RankTeam& team = split.team;
  MoeLayer layer = load(split);
  if (input.adapter != nullptr) layer.add_adapter(*input.adapter);
  // Without tokens there is nothing to time, on any rank.
  const int32_t timed = input.num_tokens() == 0 ? 0 : repetitions;
  const auto run_share = [&](const LayerInput& share) {
    LayerRun run = run_layer(split.context, layer, share, timed);
    run.weights = weight_memory(layer.plan());
    run.tp_size = team.tp_size();
    return run;
  };
  if (team.alone()) return run_share(input);
  team.meet("load the layer");
  LayerRun run = run_share(share_of(input, team));
  team.check("run the layer");
  if (!team.speaks()) std::fill(run.expert_load.begin(), run.expert_load.end(), 0);
  team.add_up(run.expert_load, kGatherPhase);
  run.median_ms = team.largest(run.median_ms, kGatherPhase);
  for (Tensor* tensor : {&run.output, &run.topk_ids, &run.topk_weights}) {
    gather(team, input.num_tokens(), *tensor);
  }
  if (input.topk_ids.empty()) gather(team, input.num_tokens(), run.logits);
  return run;
}

}  // namespace conclave::tool
