#include "layer/chunk_order.h"

#include "core/checked.h"
#include "layer/rank_agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

// Both halves of a call read every expert's weights. From so many rows an expert on, products take
// longer than the reading, so that the second reading is hidden.
constexpr int64_t kRowsOfAHalf = 32;

bool has_shared_parts(const LayerPlan& plan) { return plan.shared || plan.residual; }

// Whether bytes move while something is computed. A context without the communicator that is
// needed finds no dispatcher, which says so.
Support moves_meanwhile(const LayerPlan& plan, const Context& context) {
  if (!exchanges_tokens(plan) || context.communicator() == nullptr) return Support::yes();
  return context.communicator()->supports(CommFeature::kOverlap);
}

// Bytes that a token of evenly spread choices sends to other ranks, and that come back for it.
struct TokenTraffic {
  double rows = 0;
  double results = 0;
};

TokenTraffic traffic_of(const LayerPlan& plan) {
  const auto ranks = static_cast<double>(plan.parallel.ep_size);
  const auto choices = static_cast<double>(plan.spec.top_k);
  const bool has_own_rows = dispatched_rows_per_token(plan.spec) > 1;
  const double others = (ranks - 1) / ranks;
  const double reached = ranks * (1 - std::pow(others, choices)) * others;
  double sent = has_own_rows ? choices * others : reached;
  if (plan.options.transport == EpTransport::kFixedSlots) {
    sent = (ranks - 1) * (has_own_rows ? choices : 1);
  }
  const bool is_reduced = plan.options.ep_combine == EpCombine::kReducedPerRank;
  const auto row_bytes = static_cast<double>(plan.experts->requirements().row_bytes);
  const auto result_bytes = static_cast<double>(expert_width(plan.spec)) * sizeof(float);
  return {.rows = sent * row_bytes,
          .results = (is_reduced ? reached : choices * others) * result_bytes};
}

// With tensor-parallel ranks shared parts end in a sum over these, which all make at the same
// place of a chunk: a choice by what has come would differ between them. Where bytes move in calls
// only, peers would get this rank's rows behind its shared parts.
FillsWait choose_wait(const LayerPlan& plan, const Support& overlap) {
  if (!exchanges_tokens(plan) || !has_shared_parts(plan)) return FillsWait::kForResults;
  if (plan.part.reduces() || !overlap) return FillsWait::kForResults;
  if (plan.options.chunk_order != ChunkOrder::kInTurn) return FillsWait::kByTurns;
  const TokenTraffic traffic = traffic_of(plan);
  return traffic.rows >= traffic.results ? FillsWait::kForRows : FillsWait::kForResults;
}

// The tokens from which on a call is cut in two, if every rank brings as many.
int64_t worthwhile_cut(const LayerPlan& plan) {
  const int64_t choices = plan.spec.top_k * plan.parallel.ep_size;
  return ceil_div(2 * kRowsOfAHalf * plan.spec.num_experts, choices);
}

ChunkRule micro_batch_rule(const LayerPlan& plan) {
  const LayerOptions& options = plan.options;
  const int64_t cut_from = std::max<int64_t>(
      options.micro_batch_tokens > 0 ? options.micro_batch_tokens : worthwhile_cut(plan), 2);
  // Calls that are not cut are one chunk.
  const int64_t most = std::max(ceil_div(options.max_tokens, 2), cut_from - 1);
  return {.most_tokens = std::min(most, options.max_tokens), .cut_from = cut_from};
}

std::string why_cut(const LayerPlan& plan) {
  std::string text =
      fmt::format("calls of {} tokens or more are cut in two", plan.chunk_rule->cut_from);
  if (plan.options.micro_batch_tokens > 0) return text;
  return text + fmt::format(": {} rows for each expert in a half, if ranks bring as many each",
                            kRowsOfAHalf);
}

void record_order(LayerPlan& plan, const Support& overlap) {
  const bool is_micro = plan.options.chunk_order == ChunkOrder::kMicroBatches;
  const bool is_chosen = plan.chunk_order != ChunkOrder::kInTurn;
  std::string reason = "no rows travel between ranks: chunks run in turn";
  if (is_chosen) {
    reason = overlap ? "rows of one chunk travel while experts of the other run"
                     : "rows travel in calls only: " + overlap.reason();
    if (is_micro) reason = why_cut(plan) + "; " + reason;
  }
  plan.summary.rows.push_back({.table = "chunks",
                               .name = is_micro ? "micro_batches" : "by_twos",
                               .chosen = is_chosen,
                               .reason = std::move(reason)});
}

void record_shared(LayerPlan& plan, const Support& overlap) {
  std::string reason = "while results travel, which are heavier than rows";
  if (plan.part.reduces()) reason = "while results travel: tensor-parallel ranks add up together";
  if (plan.fills_wait == FillsWait::kForRows) {
    reason = "while rows travel, which are no lighter than results, if they have not come yet";
  }
  if (plan.fills_wait == FillsWait::kByTurns) {
    reason = "of one chunk while rows travel, of the other while results do";
  }
  if (!overlap) reason = "behind the experts, as bytes move in calls only: " + overlap.reason();
  plan.summary.rows.push_back(
      {.table = "shared parts", .name = "in waits", .chosen = true, .reason = std::move(reason)});
}

}  // namespace

void choose_chunks(LayerPlan& plan, const Context& context) {
  const bool exchanges = exchanges_tokens(plan);
  plan.fills_wait = choose_wait(plan, moves_meanwhile(plan, context));
  if (exchanges) plan.chunk_order = plan.options.chunk_order;
  if (plan.chunk_order == ChunkOrder::kMicroBatches) plan.chunk_rule = micro_batch_rule(plan);
  const bool takes_two = plan.chunk_order != ChunkOrder::kInTurn;
  plan.rows_in_background = takes_two || plan.fills_wait == FillsWait::kForRows;
  plan.results_in_background = takes_two || (exchanges && has_shared_parts(plan));
}

void record_chunks(LayerPlan& plan, const Context& context) {
  const Support overlap = moves_meanwhile(plan, context);
  if (plan.options.chunk_order != ChunkOrder::kInTurn) record_order(plan, overlap);
  if (exchanges_tokens(plan) && has_shared_parts(plan)) record_shared(plan, overlap);
}

}  // namespace conclave::inline v0
