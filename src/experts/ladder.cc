#include "experts/ladder.h"

#include "core/verdicts.h"
#include "experts/cuda/tile_choice.h"
#include "quant/gpu_rows.h"

#include "conclave/error.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace conclave::inline v0::experts {
namespace {

using Candidates = std::vector<const DeviceKernelRow*>;

constexpr const char* kTable = "kernel";

// Upper ends of the buckets of calls that are decided together: 32nds of octaves, so that a plan
// for many tokens chooses for a call as a plan for just that call would. With unordered sums,
// buckets are whole octaves, since one bucket whose kernel stores slot rows would book memory for
// the rows of all its slots.
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

Candidates supporting_rows(const LadderRequest& request, const TableChoice& choice,
                           std::vector<PlanRow>& verdicts) {
  if (!choice.forced.empty()) static_cast<void>(find_device_row(choice.forced));
  const auto supports = [&](const KernelRow& row) { return row.supports(request.problem); };
  Candidates candidates = list_fitting(device_kernels().rows(), choice, supports, verdicts);
  // None of these fits: they only get their verdicts.
  static_cast<void>(list_fitting(left_out_kernels(), choice, supports, verdicts));
  if (candidates.empty()) throw_no_row(choice.table, verdicts);
  return candidates;
}

// Leaves the reference out where another row fits.
Candidates without_reference(const Candidates& candidates, std::vector<PlanRow>& verdicts) {
  if (candidates.size() == 1) return candidates;
  Candidates rows;
  for (const DeviceKernelRow* row : candidates) {
    if (!row->is_reference) rows.push_back(row);
    settle(verdicts, kTable, row->name, false,
           row->is_reference ? "the reference, for where nothing else fits"
                             : "no bucket of tokens prefers it");
  }
  return rows;
}

struct Choice {
  const DeviceKernelRow* row = nullptr;
  DeviceTile tile;
  std::string reason;
  TileChoice skewed = {};
};

Choice choose_by_cost(const LadderRequest& request, const Candidates& rows, int64_t tokens) {
  const TileChoice choice = choose_tile(request.problem, rows, tokens, request.shared_experts);
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

// The tile of this name, or the kernel's of its shape, or of as many tokens and fewer features: how
// many stages and features there is room for depends on the form in which weights lie, which a
// table's maker may not know.
const DeviceTile* find_tile(std::span<const DeviceTile> tiles, const DeviceTile& named) {
  const DeviceTile* found = nullptr;
  for (const DeviceTile& tile : tiles) {
    if (tile == named) return &tile;
    DeviceTile alike = tile;
    alike.stages = named.stages;
    alike.features = named.features;
    if (alike != named || tile.features > named.features) continue;
    if (found == nullptr || tile.features > found->features) found = &tile;
  }
  return found;
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
  const DeviceTile named = parse_tile(entry->tile);
  const DeviceTile* const tile = find_tile((*row)->tiles(request.problem), named);
  if (tile == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a tuning table names a tile that its kernel lacks",
                 .tensor = "LayerOptions.tuning",
                 .found = entry->kernel + " " + entry->tile});
  }
  return Choice{.row = *row, .tile = *tile, .reason = "tuning table"};
}

void choose_for_skew(const LadderRequest& request, const Candidates& rows, int64_t tokens,
                     Choice& choice) {
  if (!request.has_all_experts) return;
  choice.skewed =
      choose_skewed_tile(request.problem, rows, {.row = choice.row, .tile = choice.tile}, tokens,
                         request.shared_experts);
  if (choice.skewed.row == nullptr) return;
  choice.reason += "; skewed choices: " + std::string(choice.skewed.row->name) + " " +
                   to_string(choice.skewed.tile);
}

bool serves_alike(const LadderRung& a, const LadderRung& b) {
  return a.row == b.row && a.tile == b.tile && a.skewed_row == b.skewed_row &&
         a.skewed_tile == b.skewed_tile;
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
  for (const LadderRung& rung : ladder) {
    for (const DeviceKernelRow* row : {rung.row, rung.skewed_row}) {
      if (row != nullptr)
        settle(verdicts, kTable, row->name, true, "serves some numbers of tokens");
    }
  }
}

}  // namespace

bool reads_values(const LadderRung& rung, const ExpertsProblem& problem) {
  return rung.row->reads_values && quant::value_rows_support(problem.weight_dtype, problem.quant);
}

int64_t tokens_added(const std::vector<LadderRung>& ladder, const CallRange& calls) {
  int64_t most = 0;
  for_each_rung(ladder, calls, [&](const LadderRung& rung, int64_t tokens) {
    if (rung.adds_rows) most = tokens;
  });
  return most;
}

int64_t even_tiles(const LadderRung& rung, const ExpertsProblem& problem, int64_t tokens,
                   int64_t shared_experts) {
  constexpr double kSpread = 1.1;
  return static_cast<int64_t>(kSpread *
                              expected_tiles(problem, rung.tile.tokens, tokens, shared_experts));
}

TuningKey tuning_key(const ExpertsProblem& problem) {
  return {.device = problem.gpu().name,
          .format = tuning_format(problem.weight_dtype, problem.quant),
          .num_experts = problem.num_local_experts,
          .hidden_size = problem.hidden_size,
          .intermediate_size = problem.intermediate_size,
          .top_k = problem.top_k};
}

const HostKernelRow& choose_host_kernel(const ExpertsProblem& problem, const std::string& forced,
                                        std::vector<PlanRow>& verdicts) {
  const HostKernelRow* row =
      choose_first(host_kernels(), {.table = kTable, .forced = forced}, problem, verdicts);
  if (row == nullptr) throw_no_row(kTable, verdicts);
  return *row;
}

std::vector<LadderRung> build_ladder(const LadderRequest& request, std::vector<PlanRow>& verdicts) {
  const TableChoice table{.table = kTable, .forced = request.kernel};
  Candidates candidates = supporting_rows(request, table, verdicts);
  candidates = without_reference(candidates, verdicts);
  if (request.determinism == Determinism::kBatchInvariant) {
    candidates = same_arithmetic(request, candidates);
  }
  std::vector<LadderRung> ladder;
  for (const int64_t end : bucket_ends(request.problem.max_tokens, request.determinism)) {
    std::optional<Choice> choice = choose_by_table(request, candidates, end);
    if (!choice) choice = choose_by_cost(request, candidates, end);
    choose_for_skew(request, candidates, end, *choice);
    add_rung(ladder,
             {.last_tokens = end,
              .row = choice->row,
              .tile = choice->tile,
              .reason = std::move(choice->reason),
              .skewed_row = choice->skewed.row,
              .skewed_tile = choice->skewed.tile},
             serves_alike);
  }
  mark_chosen(ladder, verdicts);
  count_even_tiles(request, ladder);
  return ladder;
}

}  // namespace conclave::inline v0::experts
