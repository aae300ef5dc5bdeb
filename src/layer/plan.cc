#include "layer/plan.h"

#include "core/checked.h"
#include "core/part_spec.h"
#include "core/verdicts.h"
#include "core/weight_types.h"
#include "experts/ladder.h"
#include "layer/chunk_order.h"
#include "layer/problems.h"
#include "quant/activation_rows.h"

#include "conclave/error.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

// Width of the widest store of any row format.
constexpr int64_t kRowAlignment = 64;

cpu::Arithmetic native_arithmetic(cpu::Isa isa) {
  if (isa == cpu::Isa::kAmx) return cpu::Arithmetic::kAmxBf16;
  if (isa == cpu::Isa::kAvx512Bf16) return cpu::Arithmetic::kDpBf16;
  return cpu::Arithmetic::kF32Fma;
}

// Chosen by name, by kernel row, by forced instruction set, or by the CPU table, in this order.
// Codes that are whole numbers beside rows that are too have an arithmetic of their own.
cpu::Arithmetic choose_arithmetic(const Context& context, const MoeSpec& spec,
                                  const LayerOptions& options, cpu::Isa isa) {
  if (!options.arithmetic.empty()) return cpu::parse_arithmetic(options.arithmetic);
  if (!options.kernel.empty()) {
    return cpu::parse_arithmetic(experts::host_kernels().find(options.kernel, "kernel").arithmetic);
  }
  if (spec.quant.activations != ActivationScale::kNone &&
      quant::activation_rule(spec.weight_dtype, spec.quant).is_exact()) {
    return cpu::choose_integer_arithmetic(isa).arithmetic;
  }
  if (!context.isa().empty()) return native_arithmetic(isa);
  return cpu::choose_arithmetic(cpu::cpu_id(), isa).arithmetic;
}

// Whether one row takes all parts of a layer in this arithmetic.
bool has_row(cpu::Arithmetic arithmetic, const MlpProblems& parts) {
  const auto rows = experts::host_kernels().rows();
  return std::any_of(rows.begin(), rows.end(), [&](const experts::HostKernelRow& row) {
    return row.arithmetic == cpu::to_string(arithmetic) && row.supports(parts.routed) &&
           (!parts.shared || row.supports(*parts.shared)) &&
           (!parts.residual || row.supports(*parts.residual));
  });
}

std::unique_ptr<Router> make_router(const Context& context, const MoeSpec& spec,
                                    std::vector<PlanRow>& rows) {
  const std::string& name = spec.router.name;
  if (const RouterFactory* custom = context.find_router(name)) {
    rows.push_back(
        {.table = "router", .name = name, .chosen = true, .reason = "added to the context"});
    std::unique_ptr<Router> router = (*custom)(spec);
    if (router) return router;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a router factory returned null", .found = name});
  }
  const auto* row =
      choose_first(routing::router_catalog(), {.table = "router", .forced = name}, spec, rows);
  if (row == nullptr) throw_no_row("router", rows);
  return row->make(spec);
}

std::string determinism(const LayerPlan& plan) {
  const bool sums_at_home =
      plan.parallel.ep_size == 1 ||
      (plan.options.ep_combine == EpCombine::kUnreduced && plan.parallel.reduce == Reduce::kFull);
  if (sums_at_home) return "D1 D2 D3";
  // The replica, and with it the rank that adds up a row, depends on the token's number.
  return plan.parallel.num_redundant_experts > 0 ? "D1" : "D1 D2";
}

// The routed experts' kernel row serves the shared experts and the residual MLP too.
void make_kernels(LayerPlan& plan, const experts::HostKernelRow& row, const MlpProblems& problems) {
  const auto make = [&](const experts::ExpertsProblem& problem, const char* part) {
    const Support support = row.supports(problem);
    if (support) return row.make(problem);
    throw Error(ErrorCode::kUnsupported,
                {.what = "kernel " + std::string(row.name) + " cannot run the " + part,
                 .found = support.reason()});
  };
  plan.experts = make(problems.routed, "experts");
  if (problems.shared) plan.shared = make(*problems.shared, "shared experts");
  if (problems.residual) plan.residual = make(*problems.residual, "residual MLP");
}

MlpProblems problems_of(const LayerPlan& plan) {
  return mlp_problems({.spec = plan.spec,
                       .part = plan.part,
                       .max_tokens = plan.options.max_tokens,
                       .max_adapter_rank = plan.options.max_adapter_rank,
                       .target = experts::CpuTarget{.isa = plan.isa,
                                                    .arithmetic = plan.arithmetic,
                                                    .permutes_bytes = cpu::permutes_bytes(),
                                                    .has_avx_vnni = cpu::has_avx_vnni()},
                       .in_place = plan.in_place});
}

// An arithmetic that nobody asked for by name gives way to float32, which takes everything.
MlpProblems settle_arithmetic(LayerPlan& plan) {
  const bool by_name = !plan.options.arithmetic.empty() || !plan.options.kernel.empty();
  MlpProblems problems = problems_of(plan);
  if (by_name || has_row(plan.arithmetic, problems)) return problems;
  plan.arithmetic = cpu::Arithmetic::kF32Fma;
  return problems_of(plan);
}

void choose_kernels(LayerPlan& plan) {
  const MlpProblems problems = settle_arithmetic(plan);
  const experts::HostKernelRow& row =
      experts::choose_host_kernel(problems.routed, plan.options.kernel, plan.summary.rows);
  plan.arithmetic = cpu::parse_arithmetic(row.arithmetic);
  plan.summary.arithmetic = cpu::to_string(plan.arithmetic);
  make_kernels(plan, row, problems);
}

void summarise(LayerPlan& plan, const dispatch::DispatcherRow& dispatcher) {
  size_t packed = 0;
  const auto add = [&packed](const experts::ExpertsKernel* kernel, int64_t count,
                             const std::optional<Support>& in_place) {
    if (kernel == nullptr || InPlaceParts::is(in_place)) return;
    const experts::SlabBytes bytes = kernel->slab_bytes();
    packed += (bytes.gate_up + bytes.down) * static_cast<size_t>(count);
  };
  add(plan.experts.get(), plan.dispatcher->num_local_experts(), plan.in_place.routed);
  add(plan.shared.get(), plan.spec.shared.count, plan.in_place.shared);
  add(plan.residual.get(), 1, plan.in_place.residual);
  Plan& summary = plan.summary;
  summary.tile = plan.experts->tile();
  summary.part = describe_part(plan.part, plan.spec, plan.parallel);
  summary.dispatcher = dispatcher.name;
  summary.num_local_experts = static_cast<int64_t>(plan.part.local_experts.size());
  summary.workspace_bytes = plan.workspace_bytes;
  summary.packed_bytes = packed;
  summary.in_place_bytes = in_place_bytes(plan.spec, plan.part, plan.in_place);
  summary.packed_layout = plan.experts->packed_layout();
}

// Records the only way to add up slices, if this layer adds them up.
void choose_reduction(LayerPlan& plan, const Context& context) {
  const ParallelSpec& parallel = plan.parallel;
  if (parallel.tp_size == 1 || parallel.reduce == Reduce::kPartial) return;
  const Support support = tensor_reduction_supports(context.tensor_communicator(), parallel);
  plan.summary.rows.push_back(
      {.table = "reduction",
       .name = "tensor.all_reduce",
       .chosen = static_cast<bool>(support),
       .reason = support ? "float32 sums over the tensor communicator" : support.reason()});
  if (!support) throw_no_row("reduction", plan.summary.rows);
  plan.part.tensor_communicator = context.tensor_communicator();
}

// Records what is read in place, and why other parts are packed.
void choose_places(LayerPlan& plan, const WeightPlaces& places) {
  plan.in_place = places.known != nullptr
                      ? *places.known
                      : find_in_place(plan.spec, plan.options, plan.part, places.source);
  const bool asked_source = places.known != nullptr || places.source != nullptr;
  const auto record = [&](const std::optional<Support>& part, const char* name) {
    if (!part) return;
    const char* where = asked_source ? "in place: read where the source has them"
                                     : "in place, where the source has them in memory";
    plan.summary.rows.push_back({.table = "weights",
                                 .name = name,
                                 .chosen = static_cast<bool>(*part),
                                 .reason = *part ? where : part->reason()});
  };
  record(plan.in_place.routed, "experts");
  record(plan.in_place.shared, "shared experts");
  record(plan.in_place.residual, "residual MLP");
}

void fill_plan(LayerPlan& plan, const Context& context, const WeightPlaces& places) {
  const MoeSpec& spec = plan.spec;
  const ParallelSpec& parallel = plan.parallel;
  const LayerOptions& options = plan.options;
  validate(spec);
  validate(parallel);
  check_options(options, experts::CpuTarget{});

  plan.isa = context.isa().empty() ? cpu::best_isa() : cpu::parse_isa(context.isa());
  plan.arithmetic = choose_arithmetic(context, plan.spec, options, plan.isa);
  plan.summary.device = context.device();
  plan.summary.isa = cpu::to_string(plan.isa);
  plan.summary.determinism = determinism(plan);
  plan.summary.router = spec.router.name;
  plan.summary.max_tokens = options.max_tokens;
  plan.gate_row_bytes = round_up(spec.hidden_size * int64_t{sizeof(float)}, kRowAlignment);
  plan.router = make_router(context, spec, plan.summary.rows);
  plan.fewer_choices =
      std::make_unique<routing::FewerChoices>(spec, [&context](const MoeSpec& fewer) {
        std::vector<PlanRow> rows;
        return make_router(context, fewer, rows);
      });
  plan.workers = context.executor().concurrency();
  plan.router_scratch_bytes = plan.router->scratch_bytes(plan.workers);
  plan.router_traits = routing::router_traits(spec);

  plan.part = plan_rank_part(spec, parallel, options.spare_experts);
  choose_reduction(plan, context);
  choose_places(plan, places);
  choose_kernels(plan);
  choose_chunks(plan, context);

  const experts::BatchRequirements rows = plan.experts->requirements();
  const int64_t rows_per_token = dispatched_rows_per_token(spec);
  const dispatch::DispatchProblem exchange{.max_tokens = plan.chunk_tokens() * rows_per_token,
                                           .top_k = spec.top_k / rows_per_token,
                                           .rows_per_sum = rows_per_token,
                                           .num_experts = plan.part.placement().num_physical(),
                                           .hidden_size = expert_width(spec),
                                           .row_bytes = rows.row_bytes,
                                           .row_dtype = rows.row_dtype,
                                           .ep_size = parallel.ep_size,
                                           .ep_rank = parallel.ep_rank,
                                           .epoch = plan.part.epoch,
                                           .reduce = parallel.reduce,
                                           .transport = options.transport,
                                           .combine = options.ep_combine,
                                           .communicator = context.communicator(),
                                           .rows_in_background = plan.rows_in_background,
                                           .results_in_background = plan.results_in_background};
  const auto* dispatcher = choose_first(dispatch::dispatcher_catalog(), {.table = "dispatcher"},
                                        exchange, plan.summary.rows);
  if (dispatcher == nullptr) throw_no_row("dispatcher", plan.summary.rows);
  plan.dispatcher = dispatcher->make(exchange);

  record_chunks(plan, context);
  plan.facts = stage_facts(plan);
  book_workspace(plan);
  summarise(plan, *dispatcher);
}

}  // namespace

std::vector<AgreedValue> own_agreed_values(const LayerPlan& plan) {
  return {{"arithmetic", static_cast<int64_t>(plan.arithmetic)}};
}

LayerPlan plan_layer(const Context& context, const MoeSpec& spec, const LayerOptions& options,
                     const ParallelSpec& parallel, const WeightPlaces& places) {
  LayerPlan plan;
  plan.spec = spec;
  plan.parallel = parallel;
  plan.options = options;
  fill_plan(plan, context, places);
  return plan;
}

Plan summarise_plan(const Context& context, const MoeSpec& spec, const LayerOptions& options,
                    const ParallelSpec& parallel, const WeightPlaces& places) {
  LayerPlan plan;
  plan.spec = spec;
  plan.parallel = parallel;
  plan.options = options;
  try {
    fill_plan(plan, context, places);
  } catch (const Error& error) {
    // The rows gathered so far already say why nothing fits.
    if (error.code() != ErrorCode::kUnsupported) throw;
  }
  return std::move(plan.summary);
}

}  // namespace conclave::inline v0
