#include "layer/cuda/plan.h"

#include "core/checked.h"
#include "core/layer_roles.h"
#include "experts/cuda/catalog.h"
#include "experts/cuda/decode_call.h"
#include "experts/cuda/decode_plan.h"
#include "layer/cuda/book_workspace.h"
#include "layer/cuda/row_format.h"
#include "layer/quant_scales.h"
#include "routing/cuda/device_router.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr const char* kDecodeName = "cuda.decode_sm90";

void check_options(const LayerOptions& options) {
  constexpr int64_t kMaxTokens = int64_t{1} << 28;
  if (options.max_tokens >= 1 && options.max_tokens <= kMaxTokens) return;
  throw Error(ErrorCode::kInvalidArgument, {.what = "LayerOptions.max_tokens is out of range",
                                            .found = std::to_string(options.max_tokens),
                                            .limit = "1 to " + std::to_string(kMaxTokens)});
}

// Parts of a layer that CUDA lacks, each a rejected row.
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

void check_router(const MoeSpec& spec, PartChecks& checks, std::vector<PlanRow>& rows) {
  const Support router = routing::device_router_supports(spec);
  checks.need(static_cast<bool>(router), "router", router.reason());
  if (router) {
    rows.push_back({.table = "router",
                    .name = spec.router.name,
                    .chosen = true,
                    .reason = "runs on the device"});
  }
}

void check_shared(const MoeSpec& spec, PartChecks& checks) {
  const SharedMode mode = spec.shared.mode;
  checks.need(mode != SharedMode::kSoftmaxMix, "shared experts", "SharedMode::kSoftmaxMix");
  checks.need(mode != SharedMode::kRouterWeight, "shared experts", "SharedMode::kRouterWeight");
  checks.need(mode != SharedMode::kFusedSlots, "shared experts", "SharedMode::kFusedSlots");
}

// Kernels weigh products, not rows: the same only where a row's codes do not depend on its size.
bool scales_follow_rows(const QuantSpec& quant) {
  return quant.activations == ActivationScale::kNone ||
         (quant.activations != ActivationScale::kTensorStatic && !quant.power_of_two_scales);
}

void check_parts(const CudaPlan& plan, PartChecks& checks, std::vector<PlanRow>& rows) {
  const MoeSpec& spec = plan.spec;
  const ParallelSpec& parallel = plan.parallel;
  check_router(spec, checks, rows);
  check_shared(spec, checks);
  const bool average = spec.shared.mode == SharedMode::kAverage;
  checks.need(!average || (spec.num_zero_experts == 0 && !spec.has_output_bias), "shared experts",
              "SharedMode::kAverage with zero experts or an output bias");
  checks.need(spec.weight_dtype != DType::kF32, "weights",
              "float32: rows of experts have 16 bits here");
  checks.need(spec.latent.size == 0, "latent", "a latent projection");
  checks.need(spec.residual.intermediate_size == 0, "residual", "a residual MLP");
  checks.need(!plan.part.has_replicas(), "placement", "redundant experts");
  const bool is_split = parallel.ep_size > 1 || parallel.tp_size > 1;
  checks.need(!is_split || parallel.reduce == Reduce::kPartial, "reduction",
              "Reduce::kFull over several ranks; Reduce::kPartial is there");
  const Support slices =
      tensor_slices_support(spec.quant, spec.intermediate_size, parallel.tp_size);
  checks.need(static_cast<bool>(slices), "quantisation", slices.reason());
  checks.need(spec.weight_on == WeightOn::kOutput || scales_follow_rows(spec.quant), "quantisation",
              "weights on the input of rows with static or power-of-two scales");
  checks.need(plan.part.inner.size() > 0, "placement", "a slice of no intermediate columns");
}

experts::DeviceExpertsProblem routed_problem(const CudaPlan& plan) {
  const MoeSpec& spec = plan.spec;
  return {.num_local_experts = static_cast<int64_t>(plan.part.local_experts.size()),
          .hidden_size = spec.hidden_size,
          .intermediate_size = plan.part.inner.size(),
          .top_k = spec.top_k,
          .max_tokens = plan.options.max_tokens,
          .weight_dtype = spec.weight_dtype,
          .quant = spec.quant,
          .activation = activation::parse_activation(spec.activation),
          .has_bias = spec.has_bias,
          .device = plan.device};
}

// Shared experts as one expert that every row chooses.
std::optional<experts::DeviceExpertsProblem> shared_problem(const CudaPlan& plan) {
  const MoeSpec& spec = plan.spec;
  if (spec.shared.mode == SharedMode::kNone || !plan.part.holds_dense) return std::nullopt;
  experts::DeviceExpertsProblem shared = routed_problem(plan);
  shared.num_local_experts = 1;
  shared.top_k = 1;
  shared.intermediate_size = plan.part.shared_inner.size();
  shared.weight_dtype = shared_weight_dtype(spec);
  shared.has_bias = spec.shared.has_bias;
  shared.activation =
      activation::parse_activation(activation_or_routed(spec.shared.activation, spec));
  return shared;
}

std::string arithmetic_text(const MoeSpec& spec) {
  if (spec.weight_dtype == DType::kF32) return "f32_fma";
  const char* format = spec.weight_dtype == DType::kF16    ? "f16"
                       : spec.weight_dtype == DType::kBF16 ? "bf16"
                                                           : "e4m3";
  return std::string("wgmma_") + format;
}

std::vector<std::string> stage_names(const CudaPlan& plan) {
  const MoeSpec& spec = plan.spec;
  std::vector<std::string> stages;
  if (spec.has_gate) stages.push_back(fmt::format("gate product [{}]", num_logits(spec)));
  stages.push_back("route");
  const bool quantised =
      spec.weight_dtype == DType::kF8E4M3 && spec.quant.activations != ActivationScale::kNone;
  if (quantised) stages.push_back("quantise");
  stages.push_back("group");
  stages.push_back("experts");
  if (plan.shared) stages.push_back(fmt::format("shared {}", plan.shared->intermediate_size));
  stages.push_back("combine");
  return stages;
}

size_t weight_bytes(const experts::DeviceExpertsProblem& problem) {
  const int64_t halves = problem.activation.gated ? 2 : 1;
  const DType dtype = problem.weight_dtype;
  const int64_t rows = halves * problem.intermediate_size;
  const int64_t gate_up = rows * padded_row(problem.hidden_size, dtype);
  const int64_t down = problem.hidden_size * padded_row(problem.intermediate_size, dtype);
  return static_cast<size_t>(problem.num_local_experts * (gate_up + down) * byte_size(dtype));
}

bool needs_only_routed_experts(const CudaPlan& plan) {
  const MoeSpec& spec = plan.spec;
  return spec.shared.mode == SharedMode::kNone && spec.num_zero_experts == 0 &&
         !spec.has_output_bias;
}

// The whole forward in one launch, for few tokens.
Support decode_fits(const CudaPlan& plan) {
  if (plan.routed.num_local_experts == 0) return Support::no("no experts are here");
  if (plan.options.determinism == Determinism::kBatchInvariant) {
    return Support::no("its sums run in another order; LayerOptions ask for batch invariance");
  }
  if (!plan.options.kernel.empty()) {
    return Support::no("LayerOptions ask for " + plan.options.kernel);
  }
  if (!needs_only_routed_experts(plan)) {
    return Support::no("the layer has more than routed experts");
  }
  return experts::decode_supports(plan.routed);
}

// How far the single launch serves: to its own limit, or as far as measured entries prefer it.
int64_t decode_reach(const CudaPlan& plan) {
  const int64_t most =
      std::min<int64_t>(experts::decode_plan(plan.routed).max_tokens, plan.options.max_tokens);
  if (plan.options.tuning == nullptr) return most;
  const TuningKey key = tuning_key(plan.routed);
  for (int64_t tokens = 1; tokens <= most; ++tokens) {
    const TuningEntry* const entry = plan.options.tuning->find(key, tokens);
    const bool measured = entry != nullptr && entry->tokens <= experts::kDecodeMaxTokens;
    if (measured && std::string_view(entry->kernel) != kDecodeName) return tokens - 1;
  }
  return most;
}

void choose_decode(CudaPlan& plan) {
  const Support support = decode_fits(plan);
  if (support) plan.decode_tokens = decode_reach(plan);
  plan.summary.rows.push_back(
      {.table = "kernel",
       .name = kDecodeName,
       .chosen = static_cast<bool>(support),
       .reason = support ? "serves few tokens in one launch" : support.reason()});
}

std::vector<LadderRung> choose_ladder(CudaPlan& plan) {
  std::vector<PlanRow> verdicts;
  const auto keep = [&] {
    plan.summary.rows.insert(plan.summary.rows.end(), verdicts.begin(), verdicts.end());
  };
  try {
    std::vector<LadderRung> ladder = build_ladder({.problem = plan.routed,
                                                   .determinism = plan.options.determinism,
                                                   .kernel = plan.options.kernel,
                                                   .tuning = plan.options.tuning.get()},
                                                  verdicts);
    keep();
    return ladder;
  } catch (const Error&) {
    keep();
    throw;
  }
}

void summarise(CudaPlan& plan) {
  Plan& summary = plan.summary;
  const MoeSpec& spec = plan.spec;
  summary.arithmetic = arithmetic_text(spec);
  const bool invariant = plan.options.determinism == Determinism::kBatchInvariant;
  summary.determinism = invariant ? "D1 D2" : "D1";
  summary.router = spec.router.name;
  summary.dispatcher = "cuda.local";
  summary.stages = stage_names(plan);
  summary.part = describe_part(plan.part, spec, plan.parallel);
  summary.max_tokens = plan.options.max_tokens;
  summary.num_local_experts = plan.routed.num_local_experts;
  summary.packed_layout = "canonical.v1";
  summary.packed_bytes = weight_bytes(plan.routed) + (plan.shared ? weight_bytes(*plan.shared) : 0);
  summarise_workspace(plan, [&](int64_t tokens) { return estimated_kernel_bytes(plan, tokens); });
  if (!plan.summary.ladder.empty()) summary.tile = plan.summary.ladder.back().tile;
}

void fill_plan(CudaPlan& plan) {
  const MoeSpec& spec = plan.spec;
  validate(spec);
  validate(plan.parallel);
  check_options(plan.options);
  plan.summary.device = fmt::format("cuda:{} {}, {} multiprocessors", plan.device.ordinal,
                                    plan.device.name, plan.device.multiprocessors);
  plan.part = plan_rank_part(spec, plan.parallel);
  PartChecks checks(plan.summary.rows);
  check_parts(plan, checks, plan.summary.rows);
  checks.throw_if_any();
  plan.row_dtype = spec.weight_dtype == DType::kF8E4M3 ? DType::kBF16 : spec.weight_dtype;
  plan.row_stride = padded_row(spec.hidden_size, plan.row_dtype);
  plan.routed = routed_problem(plan);
  plan.shared = shared_problem(plan);
  choose_decode(plan);
  if (plan.routed.num_local_experts > 0) plan.ladder = choose_ladder(plan);
  if (plan.shared) {
    std::vector<PlanRow> verdicts;
    plan.shared_ladder = build_ladder({.problem = *plan.shared,
                                       .determinism = plan.options.determinism,
                                       .kernel = plan.options.kernel,
                                       .tuning = plan.options.tuning.get()},
                                      verdicts);
  }
  summarise(plan);
}

}  // namespace

void summarise_workspace(CudaPlan& plan,
                         const std::function<KernelBytes(int64_t tokens)>& bytes_for) {
  const auto total = [&](int64_t tokens) {
    return book_workspace(plan, tokens, bytes_for(tokens)).total_bytes;
  };
  Plan& summary = plan.summary;
  summary.ladder.clear();
  int64_t first = 1;
  if (plan.decode_tokens > 0) {
    summary.ladder.push_back({.first_tokens = first,
                              .last_tokens = plan.decode_tokens,
                              .kernel = kDecodeName,
                              .tile = "",
                              .reason = "one launch",
                              .workspace_bytes = total(plan.decode_tokens)});
    first = plan.decode_tokens + 1;
  }
  for (const LadderRung& rung : plan.ladder) {
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
  const TuningKey key = tuning_key(plan.routed);
  if (tokens <= experts::kDecodeMaxTokens && decode_fits(plan)) {
    entries.push_back({.key = key, .tokens = tokens, .kernel = kDecodeName, .tile = ""});
  }
  const auto rows = experts::device_kernel_catalog().rows();
  for (const experts::DeviceKernelRow& row : rows) {
    const bool forced_out = !plan.options.kernel.empty() && row.name != plan.options.kernel;
    // The reference is there for where nothing else fits.
    const bool unneeded = &row == &rows.back() && !entries.empty();
    if (forced_out || unneeded || !row.supports(plan.routed)) continue;
    for (const experts::DeviceTile& tile : row.tiles(plan.routed)) {
      entries.push_back({.key = key,
                         .tokens = tokens,
                         .kernel = std::string(row.name),
                         .tile = experts::to_string(tile)});
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
  fill_plan(plan);
  return plan;
}

Plan summarise_cuda_plan(const CudaPlanRequest& request) {
  CudaPlan plan;
  plan.spec = request.spec;
  plan.parallel = request.parallel;
  plan.options = request.options;
  plan.device = request.device;
  try {
    fill_plan(plan);
  } catch (const Error& error) {
    // The rows gathered so far already say why nothing fits.
    if (error.code() != ErrorCode::kUnsupported) throw;
  }
  return std::move(plan.summary);
}

}  // namespace conclave::inline v0
