#include "layer/cuda/ladder.h"

#include "experts/cuda/catalog.h"
#include "experts/cuda/tile_choice.h"

#include "conclave/error.h"

#include <algorithm>
#include <optional>

namespace conclave::inline v0 {
namespace {

using experts::DeviceKernelRow;
using experts::DeviceTile;
using Candidates = std::vector<const DeviceKernelRow*>;

// Upper ends of the buckets of calls that are decided together: 32nds of octaves, so that a plan
// for many tokens chooses for a call as a plan for just that call would. When rows are added in any
// order, whole octaves: one more bucket whose kernel adds none would book the rows of its slots.
std::vector<int64_t> bucket_ends(int64_t max_tokens, Determinism determinism) {
  const int64_t buckets_an_octave = determinism == Determinism::kUnordered ? 1 : 32;
  std::vector<int64_t> ends;
  for (int64_t octave = 1; octave < max_tokens; octave *= 2) {
    const int64_t step = std::max<int64_t>(octave / buckets_an_octave, 1);
    const int64_t next = std::min(2 * octave, max_tokens);
    for (int64_t end = octave; end < next; end += step) ends.push_back(end);
  }
  ends.push_back(max_tokens);
  return ends;
}

Candidates supporting_rows(const LadderRequest& request, std::vector<PlanRow>& verdicts) {
  const Catalog<DeviceKernelRow> catalog = experts::device_kernel_catalog();
  if (!request.kernel.empty()) static_cast<void>(catalog.find(request.kernel, "kernel"));
  Candidates candidates;
  for (const DeviceKernelRow& row : catalog.rows()) {
    if (row.is_one_launch()) continue;  // serves beside the ladder
    PlanRow verdict{.table = "kernel", .name = std::string(row.name), .reason = {}};
    const Support support = row.supports(request.problem);
    if (!support) {
      verdict.reason = support.reason();
    } else if (!request.kernel.empty() && row.name != request.kernel) {
      verdict.reason = "LayerOptions ask for " + request.kernel;
    } else if (!candidates.empty() && &row == &catalog.rows().back()) {
      verdict.reason = "the reference, for where nothing else fits";
    } else {
      candidates.push_back(&row);
      verdict.reason = "no bucket of tokens prefers it";
    }
    verdicts.push_back(std::move(verdict));
  }
  if (!candidates.empty()) return candidates;
  std::string reasons;
  for (const PlanRow& verdict : verdicts) {
    reasons += (reasons.empty() ? "" : "; ") + verdict.name + ": " + verdict.reason;
  }
  throw Error(ErrorCode::kUnsupported, {.what = "no kernel can run this layer", .found = reasons});
}

struct Choice {
  const DeviceKernelRow* row = nullptr;
  DeviceTile tile;
  std::string reason;
  experts::TileChoice skewed = {};
};

Choice choose_by_cost(const LadderRequest& request, const Candidates& rows, int64_t tokens) {
  const experts::TileChoice choice =
      experts::choose_tile(request.problem, rows, tokens, request.shared_experts);
  return {.row = choice.row, .tile = choice.tile, .reason = "least by the cost model"};
}

// The rows whose results have the same bits as those of the row chosen for the largest call.
Candidates same_arithmetic(const LadderRequest& request, const Candidates& rows) {
  const Choice most = choose_by_cost(request, rows, request.problem.max_tokens);
  Candidates same;
  for (const DeviceKernelRow* row : rows) {
    const bool alike = !row->arithmetic.empty() && row->arithmetic == most.row->arithmetic;
    if (row == most.row || alike) same.push_back(row);
  }
  return same;
}

// The choice of the table's entry; none if it names a row that this problem or plan cannot take.
std::optional<Choice> choose_by_table(const LadderRequest& request, const Candidates& rows,
                                      int64_t tokens) {
  if (request.tuning == nullptr) return std::nullopt;
  const TuningEntry* const entry = request.tuning->find(tuning_key(request.problem), tokens);
  if (entry == nullptr) return std::nullopt;
  const auto row = std::find_if(rows.begin(), rows.end(), [&](const DeviceKernelRow* candidate) {
    return candidate->name == entry->kernel;
  });
  if (row == rows.end()) return std::nullopt;
  const DeviceTile tile = experts::parse_tile(entry->tile);
  const auto tiles = (*row)->tiles(request.problem);
  if (std::find(tiles.begin(), tiles.end(), tile) == tiles.end()) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a tuning table names a tile that its kernel lacks",
                 .tensor = "LayerOptions.tuning",
                 .found = entry->kernel + " " + entry->tile});
  }
  return Choice{.row = *row, .tile = tile, .reason = "tuning table"};
}

void choose_for_skew(const LadderRequest& request, const Candidates& rows, int64_t tokens,
                     Choice& choice) {
  if (!request.has_all_experts) return;
  choice.skewed =
      experts::choose_skewed_tile(request.problem, rows, {.row = choice.row, .tile = choice.tile},
                                  tokens, request.shared_experts);
  if (choice.skewed.row == nullptr) return;
  choice.reason += "; skewed choices: " + std::string(choice.skewed.row->name) + " " +
                   experts::to_string(choice.skewed.tile);
}

bool serves_on(const LadderRung& rung, const Choice& choice) {
  return rung.row == choice.row && rung.tile == choice.tile &&
         rung.skewed_row == choice.skewed.row && rung.skewed_tile == choice.skewed.tile;
}

// So that a forward need not work out how many tiles even choices make.
void count_even_tiles(const LadderRequest& request, std::vector<LadderRung>& ladder) {
  int64_t first = 1;
  for (LadderRung& rung : ladder) {
    rung.first_tokens = first;
    first = rung.last_tokens + 1;
    if (rung.skewed_row == nullptr) continue;
    for (int64_t tokens = rung.first_tokens; tokens <= rung.last_tokens; ++tokens) {
      rung.most_even_tiles.push_back(
          even_tiles(rung, request.problem, tokens, request.shared_experts));
    }
  }
}

void mark_chosen(const std::vector<LadderRung>& ladder, std::vector<PlanRow>& verdicts) {
  for (PlanRow& verdict : verdicts) {
    for (const LadderRung& rung : ladder) {
      const bool serves = rung.row->name == verdict.name;
      const bool skewed = rung.skewed_row != nullptr && rung.skewed_row->name == verdict.name;
      if (!serves && !skewed) continue;
      verdict.chosen = true;
      verdict.reason = "serves some numbers of tokens";
    }
  }
}

}  // namespace

std::vector<CallRange> calls_by_rung(const std::vector<LadderRung>& ladder, int64_t max_tokens) {
  std::vector<CallRange> ranges;
  int64_t first = 1;
  for_each_rung(ladder, {.first = 1, .last = max_tokens}, [&](const LadderRung&, int64_t tokens) {
    ranges.push_back({.first = first, .last = tokens});
    first = tokens + 1;
  });
  if (ranges.empty()) ranges.push_back({.first = 1, .last = max_tokens});
  return ranges;
}

int64_t tokens_added(const std::vector<LadderRung>& ladder, const CallRange& calls) {
  int64_t most = 0;
  for_each_rung(ladder, calls, [&](const LadderRung& rung, int64_t tokens) {
    if (rung.adds_rows) most = tokens;
  });
  return most;
}

int64_t even_tiles(const LadderRung& rung, const experts::DeviceExpertsProblem& problem,
                   int64_t tokens, int64_t shared_experts) {
  constexpr double kSpread = 1.1;
  return static_cast<int64_t>(
      kSpread * experts::expected_tiles(problem, rung.tile.tokens, tokens, shared_experts));
}

TuningKey tuning_key(const experts::DeviceExpertsProblem& problem) {
  return {.device = problem.device.name,
          .format = tuning_format(problem.weight_dtype, problem.quant),
          .num_experts = problem.num_local_experts,
          .hidden_size = problem.hidden_size,
          .intermediate_size = problem.intermediate_size,
          .top_k = problem.top_k};
}

std::vector<LadderRung> build_ladder(const LadderRequest& request, std::vector<PlanRow>& verdicts) {
  Candidates candidates = supporting_rows(request, verdicts);
  if (request.determinism == Determinism::kBatchInvariant) {
    candidates = same_arithmetic(request, candidates);
  }
  std::vector<LadderRung> ladder;
  for (const int64_t end : bucket_ends(request.problem.max_tokens, request.determinism)) {
    std::optional<Choice> choice = choose_by_table(request, candidates, end);
    if (!choice) choice = choose_by_cost(request, candidates, end);
    choose_for_skew(request, candidates, end, *choice);
    if (!ladder.empty() && serves_on(ladder.back(), *choice)) {
      ladder.back().last_tokens = end;
      continue;
    }
    ladder.push_back({.last_tokens = end,
                      .row = choice->row,
                      .tile = choice->tile,
                      .reason = std::move(choice->reason),
                      .skewed_row = choice->skewed.row,
                      .skewed_tile = choice->skewed.tile});
  }
  mark_chosen(ladder, verdicts);
  count_even_tiles(request, ladder);
  return ladder;
}

}  // namespace conclave::inline v0
