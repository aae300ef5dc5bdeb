#include "layer/cuda/plan.h"

#include "core/checked.h"
#include "core/layer_roles.h"
#include "core/weight_types.h"
#include "experts/cuda/catalog.h"
#include "experts/cuda/sm90/decode/plan.h"
#include "layer/cuda/book_workspace.h"
#include "layer/cuda/launch_tables.h"
#include "layer/cuda/row_format.h"
#include "layer/quant_scales.h"
#include "quant/weight_format.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

void check_options(const LayerOptions& options) {
  constexpr int64_t kMaxTokens = int64_t{1} << 28;
  if (options.max_tokens >= 1 && options.max_tokens <= kMaxTokens) return;
  throw Error(ErrorCode::kInvalidArgument, {.what = "LayerOptions.max_tokens is out of range",
                                            .found = std::to_string(options.max_tokens),
                                            .limit = "1 to " + std::to_string(kMaxTokens)});
}

// Collects the parts of a layer that CUDA lacks, each as a rejected row.
class PartChecks {
 public:
  explicit PartChecks(std::vector<PlanRow>& rows) : rows_(rows) {}

  void need(bool good, const char* part, std::string reason) {
    if (good) return;
    reasons_ += (reasons_.empty() ? "" : "; ") + std::string(part) + ": " + reason;
    rows_.push_back({.table = "part", .name = part, .reason = std::move(reason)});
  }
  void throw_if_any() const {
    if (reasons_.empty()) return;
    throw Error(ErrorCode::kUnsupported, {.what = "CUDA lacks parts of this layer",
                                          .found = reasons_,
                                          .hint = "the CPU runs it: ContextOptions.device"});
  }

 private:
  std::vector<PlanRow>& rows_;
  std::string reasons_;
};

// A layer without a gate may serve only calls that bring ids and weights. The router's limits do
// not bind these, so they do not reject the layer.
void check_router(CudaPlan& plan, PartChecks& checks, std::vector<PlanRow>& rows) {
  const MoeSpec& spec = plan.spec;
  const Support router = routing::device_router_supports(spec);
  const routing::DeviceRouterRow* const row = routing::find_device_router(spec);
  plan.router_writes_choices = row != nullptr && row->writes_choices;
  plan.router_traits = routing::router_traits(spec.router.name);
  if (!router && !spec.has_gate && routing::is_default_router(spec)) {
    plan.router_limit = router.reason();
    rows.push_back({.table = "router",
                    .name = spec.router.name,
                    .reason = router.reason() + ": calls must bring topk_ids and topk_weights"});
    return;
  }
  checks.need(static_cast<bool>(router), "router", router.reason());
  if (router) {
    plan.router = row->make(spec);
    rows.push_back({.table = "router",
                    .name = spec.router.name,
                    .chosen = true,
                    .reason = "runs on the device"});
  }
}

// Kernels weigh products, not rows, whose codes a weight may change: a value that lies halfway
// between two codes leaves that place when row and step are multiplied.
bool weight_may_change_codes(const QuantSpec& quant) {
  return quant.activations != ActivationScale::kNone;
}

void check_slices(const CudaPlan& plan, PartChecks& checks) {
  const MoeSpec& spec = plan.spec;
  const auto check = [&](DType dtype, int64_t size, const TensorSlice& slice) {
    const Support slices = tensor_slices_support(spec.quant, size, plan.parallel.tp_size);
    checks.need(is_plain(dtype) || slices, "quantisation", slices.reason());
    checks.need(size == 0 || slice.size() > 0, "placement", "a slice of no intermediate columns");
  };
  check(spec.weight_dtype, spec.intermediate_size, plan.part.inner);
  if (spec.shared.mode != SharedMode::kNone) {
    check(shared_weight_dtype(spec), spec.shared.intermediate_size, plan.part.shared_inner);
  }
  check(DType::kBF16, spec.residual.intermediate_size, plan.part.residual_inner);
}

void check_parts(CudaPlan& plan, PartChecks& checks, std::vector<PlanRow>& rows) {
  const ParallelSpec& parallel = plan.parallel;
  check_router(plan, checks, rows);
  const bool is_split = parallel.ep_size > 1 || parallel.tp_size > 1;
  checks.need(!is_split || parallel.reduce == Reduce::kPartial, "reduction",
              "Reduce::kFull over several ranks; Reduce::kPartial is there");
  check_slices(plan, checks);
}

// Lists the dispatchers and chooses the first that fits; none may, which check_parts reports.
void choose_dispatcher(CudaPlan& plan) {
  const dispatch::DispatchProblem problem{.ep_size = plan.parallel.ep_size,
                                          .ep_rank = plan.parallel.ep_rank,
                                          .reduce = plan.parallel.reduce};
  std::string& chosen = plan.summary.dispatcher;
  for (const auto& row : dispatch::device_dispatcher_catalog().rows()) {
    const Support fits = row.supports(problem);
    const bool first = fits && chosen.empty();
    if (first) chosen = row.name;
    plan.summary.rows.push_back({.table = "dispatcher",
                                 .name = std::string(row.name),
                                 .chosen = first,
                                 .reason = first  ? "rows stay on their rank"
                                           : fits ? "a row before it fits"
                                                  : fits.reason()});
  }
}

DType row_dtype_of(DType weight_dtype) {
  return is_plain(weight_dtype) ? weight_dtype : DType::kBF16;
}

CudaMlpPlan mlp_plan(const experts::DeviceExpertsProblem& problem) {
  const DType dtype = row_dtype_of(problem.weight_dtype);
  return {.problem = problem,
          .ladder = {},
          .row_dtype = dtype,
          .row_stride = padded_row(problem.hidden_size, dtype)};
}

experts::DeviceExpertsProblem routed_problem(const CudaPlan& plan) {
  const MoeSpec& spec = plan.spec;
  return {.num_local_experts = static_cast<int64_t>(plan.part.local_experts.size()),
          .hidden_size = expert_width(spec),
          .intermediate_size = plan.part.inner.size(),
          .top_k = spec.top_k,
          .max_tokens = plan.options.max_tokens,
          .weight_dtype = spec.weight_dtype,
          .quant = spec.quant,
          .activation = activation::parse_activation(spec.activation),
          .has_bias = spec.has_bias,
          .device = plan.device};
}

bool holds_shared(const CudaPlan& plan) {
  return plan.spec.shared.mode != SharedMode::kNone && plan.part.holds_dense;
}

// The problem of the shared experts, which every row chooses.
experts::DeviceExpertsProblem shared_problem(const CudaPlan& plan) {
  const MoeSpec& spec = plan.spec;
  experts::DeviceExpertsProblem shared = routed_problem(plan);
  shared.num_local_experts = spec.shared.count;
  shared.top_k = spec.shared.count;
  shared.hidden_size = spec.hidden_size;
  shared.intermediate_size = plan.part.shared_inner.size();
  shared.weight_dtype = shared_weight_dtype(spec);
  shared.has_bias = spec.shared.has_bias;
  shared.activation =
      activation::parse_activation(activation_or_routed(spec.shared.activation, spec));
  return shared;
}

experts::DeviceExpertsProblem residual_problem(const CudaPlan& plan) {
  const MoeSpec& spec = plan.spec;
  experts::DeviceExpertsProblem residual = routed_problem(plan);
  residual.num_local_experts = 1;
  residual.top_k = 1;
  residual.hidden_size = spec.hidden_size;
  residual.intermediate_size = plan.part.residual_inner.size();
  residual.weight_dtype = spec.residual.weight_dtype.value_or(spec.weight_dtype);
  residual.has_bias = false;
  residual.activation =
      activation::parse_activation(activation_or_routed(spec.residual.activation, spec));
  return residual;
}

bool same_formula(const ActivationSpec& a, const ActivationSpec& b) {
  return a.name == b.name && a.limit == b.limit && a.alpha == b.alpha && a.beta == b.beta &&
         a.linear_beta == b.linear_beta;
}

// True if a shared expert's intermediate rows may be cut every `columns` columns; scales over whole
// rows forbid it.
bool can_slice(const QuantSpec& quant, int64_t columns) {
  constexpr int64_t kGroupColumns = 128;
  if (quant.weights == WeightScale::kNone) return true;
  const bool whole_blocks = quant.weights != WeightScale::kBlock ||
                            (columns % quant.block_rows == 0 && columns % quant.block_cols == 0);
  const bool whole_scales =
      quant.activations == ActivationScale::kNone ||
      (quant.activations == ActivationScale::kGroup && columns % kGroupColumns == 0);
  return whole_blocks && whole_scales;
}

// Yes if shared experts can run as further experts of the routed ones' launches.
Support fused_support(const CudaPlan& plan, SharedForm form) {
  // The router has one lane per slot; sums of more rows cost more than separate launches.
  constexpr int64_t kMaxSlots = 32;
  constexpr int64_t kMaxShared = 8;
  constexpr int64_t kMaxExperts = 1024;
  const MoeSpec& spec = plan.spec;
  const experts::DeviceExpertsProblem& routed = plan.routed.problem;
  const experts::DeviceExpertsProblem shared = shared_problem(plan);
  if (form == SharedForm::kSeparate) return Support::no("the weights are used where they lie");
  if (routed.num_local_experts == 0) return Support::no("no routed experts are here");
  if (shared.weight_dtype != routed.weight_dtype) return Support::no("weights of another type");
  if (!same_formula(activation_or_routed(spec.shared.activation, spec), spec.activation)) {
    return Support::no("another activation");
  }
  if (shared.has_bias && !routed.has_bias) return Support::no("biases of their own");
  if (shared.hidden_size != routed.hidden_size) return Support::no("another width of rows");
  if (plan.part.has_replicas()) return Support::no("the layer has redundant experts");
  if (spec.quant.activations == ActivationScale::kTensorStatic) {
    return Support::no("static scales of their own");
  }
  if (spec.weight_on == WeightOn::kInput &&
      (spec.shared.mode != SharedMode::kAdd || plan.weighs_rows)) {
    return Support::no("routed weights are on the input");
  }
  const int64_t width = shared.intermediate_size;
  const int64_t slices = width / routed.intermediate_size;
  if (slices * routed.intermediate_size != width) {
    return Support::no("their width is no multiple of the routed experts'");
  }
  if (slices > 1 && !can_slice(spec.quant, routed.intermediate_size)) {
    return Support::no("scales of whole rows");
  }
  const int64_t slots = spec.shared.count * slices;
  if (slots > kMaxShared || routed.top_k + slots > kMaxSlots ||
      routed.num_local_experts + slots > kMaxExperts) {
    return Support::no(fmt::format("{} more slots per token", slots));
  }
  return Support::yes();
}

void place_shared(CudaPlan& plan, SharedForm form) {
  if (!holds_shared(plan)) return;
  const Support fused = fused_support(plan, form);
  plan.summary.rows.push_back({.table = "shared experts",
                               .name = "cuda.same_launches",
                               .chosen = static_cast<bool>(fused),
                               .reason = fused ? "as further experts" : fused.reason()});
  plan.summary.rows.push_back({.table = "shared experts",
                               .name = "cuda.own_launches",
                               .chosen = !fused,
                               .reason = fused ? "the row before fits" : "fits always"});
  if (!fused) {
    plan.shared = mlp_plan(shared_problem(plan));
    return;
  }
  experts::DeviceExpertsProblem& routed = plan.routed.problem;
  const int64_t slices = plan.part.shared_inner.size() / routed.intermediate_size;
  plan.fused = {.count = static_cast<int32_t>(plan.spec.shared.count),
                .slices = static_cast<int32_t>(slices)};
  routed.num_local_experts += plan.fused.slots();
  routed.top_k += plan.fused.slots();
}

std::string arithmetic_text(const CudaPlan& plan) {
  const std::vector<LadderRung>& ladder = plan.routed.ladder;
  const auto& reference = experts::device_kernel_catalog().rows().back();
  const bool widens = !ladder.empty() && ladder.back().row == &reference;
  if (widens || plan.spec.weight_dtype == DType::kF32) return "f32_fma";
  return "wgmma_" + std::string(quant::format_of(plan.spec.weight_dtype).name);
}

std::vector<std::string> stage_names(const CudaPlan& plan) {
  const MoeSpec& spec = plan.spec;
  std::vector<std::string> stages;
  const bool projects = spec.latent.size != 0;
  if (spec.has_gate) stages.push_back(fmt::format("gate product [{}]", num_logits(spec)));
  stages.push_back("route");
  stages.push_back("group");
  if (projects) stages.push_back(fmt::format("latent down {}", spec.latent.size));
  if (plan.routed.quantises()) stages.push_back("quantise");
  stages.push_back(plan.fused.slots() == 0
                       ? "experts"
                       : fmt::format("experts, {} slots of shared ones", plan.fused.slots()));
  if (plan.shared) {
    const auto& shared = plan.shared->problem;
    stages.push_back(
        fmt::format("{} shared of {}", shared.num_local_experts, shared.intermediate_size));
  }
  if (plan.residual) {
    stages.push_back(fmt::format("residual MLP {}", plan.residual->problem.intermediate_size));
  }
  stages.push_back("combine");
  if (projects && spec.latent.has_norm) stages.push_back("rms norm");
  if (projects) stages.push_back(fmt::format("latent up {}, finish", spec.hidden_size));
  return stages;
}

size_t weight_bytes(const experts::DeviceExpertsProblem& problem) {
  const int64_t halves = problem.activation.gated ? 2 : 1;
  const DType dtype = problem.weight_dtype;
  const int64_t rows = halves * problem.intermediate_size;
  const int64_t gate_up = rows * padded_row(problem.hidden_size, dtype);
  const int64_t down = problem.hidden_size * padded_row(problem.intermediate_size, dtype);
  return static_cast<size_t>(packed_bytes(dtype, problem.num_local_experts * (gate_up + down)));
}

// Slots of fused shared experts count as plain slots if the routed sum is not changed afterwards.
bool sums_only_slots(const CudaPlan& plan) {
  const MoeSpec& spec = plan.spec;
  const SharedMode mode = spec.shared.mode;
  const bool mixes = mode == SharedMode::kAverage || mode == SharedMode::kSoftmaxMix;
  const bool plain_slots =
      plan.fused.slots() == 0 || (spec.output_scale == 1 && spec.weight_on == WeightOn::kOutput);
  return !plan.shared && !mixes && plain_slots && spec.num_zero_experts == 0 &&
         !spec.has_output_bias && !plan.residual && spec.latent.size == 0 &&
         !plan.part.has_replicas() && !plan.weighs_rows;
}

// Yes if the row can do the whole forward for few tokens in one launch.
Support one_launch_fits(const CudaPlan& plan, const experts::DeviceKernelRow& row) {
  if (plan.routed.problem.num_local_experts == 0) return Support::no("no experts are here");
  if (plan.options.determinism == Determinism::kBatchInvariant) {
    return Support::no("its sums run in another order; LayerOptions ask for batch invariance");
  }
  if (plan.options.kernel == row.name) {
    return Support::no("serves few tokens only, beside another kernel: it cannot be forced");
  }
  if (!plan.options.kernel.empty()) {
    return Support::no("LayerOptions ask for " + plan.options.kernel);
  }
  // It multiplies an expert's weights with a token's row once, even if two choices name the expert.
  if (plan.spec.weight_on == WeightOn::kInput && plan.spec.top_k > 1) {
    return Support::no("every choice reads a row of its own");
  }
  if (!plan.router_limit.empty()) return Support::no(plan.router_limit);
  if (!sums_only_slots(plan)) {
    return Support::no("the layer does more than a weighted sum of its slots");
  }
  return row.supports(plan.routed.problem);
}

// The most tokens of a call that the row can take.
int64_t one_launch_limit(const CudaPlan& plan, const experts::DeviceKernelRow& row) {
  return std::min(row.one_launch(plan.routed.problem).most, plan.options.max_tokens);
}

// The most tokens that the row serves: by rule, or as far as measured entries prefer it.
int64_t one_launch_tokens(const CudaPlan& plan, const experts::DeviceKernelRow& row) {
  const experts::OneLaunchReach reach = row.one_launch(plan.routed.problem);
  const int64_t most = one_launch_limit(plan, row);
  const int64_t by_rule = std::min(most, reach.preferred);
  if (plan.options.tuning == nullptr) return by_rule;
  const TuningKey key = tuning_key(plan.routed.problem);
  for (int64_t tokens = 1; tokens <= most; ++tokens) {
    const TuningEntry* const entry = plan.options.tuning->find(key, tokens);
    const bool measured = entry != nullptr && entry->tokens <= experts::kDecodeMaxTokens;
    const bool serves = measured ? entry->kernel == row.name : tokens <= by_rule;
    if (!serves) return tokens - 1;
  }
  return most;
}

// The first row of one launch that fits; without one, all calls take the ladder.
void choose_one_launch(CudaPlan& plan) {
  for (const experts::DeviceKernelRow& row : experts::device_kernel_catalog().rows()) {
    if (!row.is_one_launch()) continue;
    const Support fits = one_launch_fits(plan, row);
    const bool chosen = fits && plan.decode_row == nullptr;
    if (chosen) {
      plan.decode_row = &row;
      plan.decode_tokens = one_launch_tokens(plan, row);
    }
    plan.summary.rows.push_back({.table = "kernel",
                                 .name = std::string(row.name),
                                 .chosen = chosen,
                                 .reason = chosen ? "serves few tokens in one launch"
                                           : fits ? "a row before it fits"
                                                  : fits.reason()});
  }
}

LadderRequest ladder_request(const CudaPlan& plan, const experts::DeviceExpertsProblem& problem) {
  return {.problem = problem,
          .determinism = plan.options.determinism,
          .kernel = plan.options.kernel,
          .tuning = plan.options.tuning.get()};
}

// Yes if the down product may add up a token's rows in any order.
Support any_order_fits(const CudaPlan& plan) {
  if (plan.num_slots() == 1) return Support::no("one row per token: nothing to add");
  if (plan.fused.slots() > 0) return Support::no("shared experts have slots of their own");
  if (plan.rows_per_token() > 1) return Support::no("every slot reads a row of its own");
  return Support::yes();
}

void add_in_any_order(CudaPlan& plan) {
  const Support support = any_order_fits(plan);
  bool some = false;
  bool all = true;
  for (LadderRung& rung : plan.routed.ladder) {
    rung.adds_rows = support && rung.row->adds_rows;
    if (rung.adds_rows) rung.reason += ", adds rows in any order";
    some |= rung.adds_rows;
    all &= rung.adds_rows;
  }
  const std::string why = !support ? support.reason()
                          : some   ? "the down product of some rungs adds up a token's rows"
                                   : "no kernel of the ladder adds rows";
  plan.summary.rows.push_back(
      {.table = "sum", .name = "cuda.any_order", .chosen = some, .reason = why});
  plan.summary.rows.push_back({.table = "sum",
                               .name = "cuda.in_order",
                               .chosen = !all,
                               .reason = all ? "the row before serves all" : "for all others"});
}

void choose_routed_ladder(CudaPlan& plan) {
  std::vector<PlanRow> verdicts;
  const auto keep = [&] {
    plan.summary.rows.insert(plan.summary.rows.end(), verdicts.begin(), verdicts.end());
  };
  try {
    LadderRequest request = ladder_request(plan, plan.routed.problem);
    request.shared_experts = plan.fused.slots();
    request.has_all_experts = plan.parallel.ep_size == 1;
    plan.routed.ladder = build_ladder(request, verdicts);
    keep();
    if (plan.options.determinism == Determinism::kUnordered) add_in_any_order(plan);
  } catch (const Error&) {
    keep();
    throw;
  }
}

// A forced kernel is meant for the routed experts; parts that it cannot run choose another.
void choose_other_ladder(const CudaPlan& plan, CudaMlpPlan& part) {
  LadderRequest request = ladder_request(plan, part.problem);
  if (!request.kernel.empty()) {
    const auto& row = experts::device_kernel_catalog().find(request.kernel, "kernel");
    if (!row.supports(part.problem)) request.kernel.clear();
  }
  std::vector<PlanRow> verdicts;
  part.ladder = build_ladder(request, verdicts);
}

// D1 requires a fixed order in every sum.
std::string determinism_text(const CudaPlan& plan) {
  if (plan.options.determinism == Determinism::kBatchInvariant) return "D1 D2";
  const CallRange calls{.first = 1, .last = plan.options.max_tokens};
  return tokens_added(plan.routed.ladder, calls) > 0 ? "none" : "D1";
}

void summarise(CudaPlan& plan) {
  Plan& summary = plan.summary;
  const MoeSpec& spec = plan.spec;
  summary.arithmetic = arithmetic_text(plan);
  summary.determinism = determinism_text(plan);
  summary.router = spec.router.name;
  summary.stages = stage_names(plan);
  summary.part = describe_part(plan.part, spec, plan.parallel);
  summary.max_tokens = plan.options.max_tokens;
  summary.num_local_experts = static_cast<int64_t>(plan.part.local_experts.size());
  summary.packed_layout = "canonical.v1";
  summary.packed_bytes = weight_bytes(plan.routed.problem);
  for (const std::optional<CudaMlpPlan>* part : {&plan.shared, &plan.residual}) {
    if (*part) summary.packed_bytes += weight_bytes((*part)->problem);
  }
  summarise_workspace(plan, [&](int64_t tokens) { return estimated_kernel_bytes(plan, tokens); });
  if (!plan.summary.ladder.empty()) summary.tile = plan.summary.ladder.back().tile;
}

void fill_plan(CudaPlan& plan, SharedForm form) {
  const MoeSpec& spec = plan.spec;
  validate(spec);
  validate(plan.parallel);
  check_options(plan.options);
  plan.summary.device = fmt::format("cuda:{} {}, {} multiprocessors", plan.device.ordinal,
                                    plan.device.name, plan.device.multiprocessors);
  plan.part = plan_rank_part(spec, plan.parallel);
  PartChecks checks(plan.summary.rows);
  check_parts(plan, checks, plan.summary.rows);
  choose_dispatcher(plan);
  checks.throw_if_any();
  plan.weighs_rows = spec.weight_on == WeightOn::kInput && !is_plain(spec.weight_dtype) &&
                     weight_may_change_codes(spec.quant);
  plan.routed = mlp_plan(routed_problem(plan));
  place_shared(plan, form);
  if (spec.residual.intermediate_size != 0 && plan.part.holds_dense) {
    plan.residual = mlp_plan(residual_problem(plan));
  }
  choose_one_launch(plan);
  if (plan.routed.problem.num_local_experts > 0) choose_routed_ladder(plan);
  if (plan.shared) choose_other_ladder(plan, *plan.shared);
  if (plan.residual) choose_other_ladder(plan, *plan.residual);
  choose_launches(plan);
  summarise(plan);
}

}  // namespace

bool CudaMlpPlan::quantises() const {
  return !is_plain(problem.weight_dtype) && problem.quant.activations != ActivationScale::kNone;
}

int32_t CudaPlan::num_ids() const {
  const int64_t routed_ids =
      part.has_replicas() ? part.placement().num_physical() : spec.num_experts;
  return static_cast<int32_t>(routed_ids) + fused.slots();
}

void summarise_workspace(CudaPlan& plan,
                         const std::function<KernelBytes(int64_t tokens)>& bytes_of) {
  const auto total = [&](int64_t tokens) { return workspace_bytes(plan, tokens, bytes_of); };
  Plan& summary = plan.summary;
  summary.ladder.clear();
  int64_t first = 1;
  if (plan.decode_tokens > 0) {
    summary.ladder.push_back({.first_tokens = first,
                              .last_tokens = plan.decode_tokens,
                              .kernel = std::string(plan.decode_row->name),
                              .tile = "",
                              .reason = "one launch",
                              .workspace_bytes = total(plan.decode_tokens)});
    first = plan.decode_tokens + 1;
  }
  for (const LadderRung& rung : plan.routed.ladder) {
    if (rung.last_tokens < first) continue;
    summary.ladder.push_back({.first_tokens = first,
                              .last_tokens = rung.last_tokens,
                              .kernel = std::string(rung.row->name),
                              .tile = experts::to_string(rung.tile),
                              .reason = rung.reason,
                              .workspace_bytes = total(rung.last_tokens)});
    first = rung.last_tokens + 1;
  }
  summary.workspace_bytes = total(plan.options.max_tokens);
}

std::vector<TuningEntry> list_candidates(const CudaPlan& plan, int64_t tokens) {
  std::vector<TuningEntry> entries;
  const auto entry_of = [&](const experts::DeviceKernelRow& row, std::string tile) {
    return TuningEntry{.key = tuning_key(plan.routed.problem),
                       .tokens = tokens,
                       .kernel = std::string(row.name),
                       .tile = std::move(tile)};
  };
  const auto rows = experts::device_kernel_catalog().rows();
  for (const experts::DeviceKernelRow& row : rows) {
    if (row.is_one_launch()) {
      const bool fits = one_launch_fits(plan, row) && tokens <= one_launch_limit(plan, row);
      if (fits) entries.push_back(entry_of(row, ""));
      continue;
    }
    const bool forced_out = !plan.options.kernel.empty() && row.name != plan.options.kernel;
    // The reference kernel serves only if nothing else fits.
    const bool unneeded = &row == &rows.back() && !entries.empty();
    if (forced_out || unneeded || !row.supports(plan.routed.problem)) continue;
    for (const experts::DeviceTile& tile : row.tiles(plan.routed.problem)) {
      entries.push_back(entry_of(row, experts::to_string(tile)));
    }
  }
  return entries;
}

CudaPlan plan_cuda_layer(const CudaPlanRequest& request) {
  CudaPlan plan;
  plan.spec = request.spec;
  plan.parallel = request.parallel;
  plan.options = request.options;
  plan.device = request.device;
  plan.shared_form = request.shared;
  fill_plan(plan, request.shared);
  return plan;
}

Plan summarise_cuda_plan(const CudaPlanRequest& request) {
  CudaPlan plan;
  plan.spec = request.spec;
  plan.parallel = request.parallel;
  plan.options = request.options;
  plan.device = request.device;
  try {
    fill_plan(plan, request.shared);
  } catch (const Error& error) {
    // The rows gathered so far already say why nothing fits.
    if (error.code() != ErrorCode::kUnsupported) throw;
  }
  return std::move(plan.summary);
}

}  // namespace conclave::inline v0
