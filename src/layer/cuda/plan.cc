#include "layer/cuda/plan.h"

#include "core/checked.h"
#include "core/part_spec.h"
#include "core/shared_facts.h"
#include "core/verdicts.h"
#include "core/weight_types.h"
#include "layer/cuda/adapter_plan.h"
#include "layer/cuda/describe_plan.h"
#include "layer/cuda/launch_tables.h"
#include "layer/cuda/one_launch.h"
#include "layer/cuda/place_shared.h"
#include "layer/cuda/row_format.h"
#include "layer/cuda/slice_support.h"
#include "layer/problems.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

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
  plan.router_traits = routing::router_traits(spec);
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
    plan.fewer_routers = std::make_shared<routing::FewerDeviceRouters>(spec);
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
  if (shared_facts(spec).is_there) {
    check(shared_weight_dtype(spec), spec.shared.intermediate_size, plan.part.shared_inner);
  }
  check(DType::kBF16, spec.residual.intermediate_size, plan.part.residual_inner);
}

// Whether tensor-parallel ranks can add up on their devices, with nobody waiting.
Support sum_support(const CudaPlan& plan, const Communicator* communicator) {
  if (plan.spec.latent.has_norm) {
    return Support::no(
        "LatentSpec.has_norm needs the whole sum of a token, and slices have a part of it");
  }
  if (Support fits = tensor_reduction_supports(communicator, plan.parallel); !fits) return fits;
  for (const CommFeature feature : {CommFeature::kDeviceMemory, CommFeature::kStreamOrder}) {
    if (Support can = communicator->supports(feature); !can) return can;
  }
  return communicator->supports_reduction(DType::kF32, ReduceOp::kSum);
}

void plan_sum_over_ranks(CudaPlan& plan, Communicator* communicator, PartChecks& checks) {
  const ParallelSpec& parallel = plan.parallel;
  if (parallel.tp_size == 1 || parallel.reduce == Reduce::kPartial) return;
  const Support support = sum_support(plan, communicator);
  checks.need(static_cast<bool>(support), "reduction", support.reason());
  if (!support) return;
  plan.part.tensor_communicator = communicator;
  plan.part.asks_ranks = false;
  // The sum has what is not split from one rank.
  plan.part.adds_rest = parallel.tp_rank == 0;
  plan.summary.rows.push_back(
      {.table = "reduction",
       .name = "tensor.all_reduce",
       .chosen = true,
       .reason = "float32 sums over the tensor communicator, on the device"});
  list_launches(plan, "reduction", *communicator);
}

void check_parts(CudaPlan& plan, PartChecks& checks, std::vector<PlanRow>& rows) {
  check_router(plan, checks, rows);
  checks.need(
      plan.options.weights == WeightUse::kPacked, "weights",
      "weights in place of host memory; those in its own memory a GPU reads where they lie anyway");
  if (!is_plain(plan.spec.weight_dtype)) {
    const Support rows_support = gpu_rows_support(plan.spec.weight_dtype, plan.spec.quant);
    checks.need(static_cast<bool>(rows_support), "quantisation", rows_support.reason());
  }
  check_slices(plan, checks);
}

// Expert-parallel ranks take the row that moves rows, which others cannot.
void choose_dispatcher(CudaPlan& plan, Communicator* communicator, PartChecks& checks) {
  const ParallelSpec& parallel = plan.parallel;
  const dispatch::DispatchProblem problem{.ep_size = parallel.ep_size,
                                          .ep_rank = parallel.ep_rank,
                                          .reduce = parallel.reduce,
                                          .communicator = communicator};
  const auto catalog = dispatch::device_dispatcher_catalog();
  const bool travel = parallel.ep_size > 1 && parallel.reduce == Reduce::kFull;
  const auto* row = choose_first(
      catalog,
      {.table = "dispatcher",
       .why = travel ? "rows go to every rank, sums come home" : "rows stay on their rank"},
      problem, plan.summary.rows);
  if (row == nullptr) {
    const Support support = catalog.rows().back().supports(problem);
    return checks.need(false, "reduction", "rows of other ranks: " + support.reason());
  }
  plan.summary.dispatcher = row->name;
  if (row->moves_rows) plan.part.expert_communicator = communicator;
}

// The experts of every rank take the tokens of all.
void check_gathered_tokens(const CudaPlan& plan) {
  const int64_t most = plan.device.most_tokens;
  if (plan.gathered(plan.options.max_tokens) <= most) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "LayerOptions.max_tokens is out of range for ranks that gather rows",
               .found = fmt::format("{} for each of {} ranks", plan.options.max_tokens,
                                    plan.parallel.ep_size),
               .limit = fmt::format("{} for all ranks together", most)});
}

DType row_dtype_of(DType weight_dtype) {
  return is_plain(weight_dtype) ? weight_dtype : DType::kBF16;
}

experts::LadderRequest ladder_request(const CudaPlan& plan,
                                      const experts::ExpertsProblem& problem) {
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
  for (experts::LadderRung& rung : plan.routed.ladder) {
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

// Where rows gather, a rank's experts get as many of all ranks' choices as its own tokens have, if
// these fall evenly: what is best for so many is best for the tokens of all.
void spread_ladder(CudaPlan& plan) {
  for (experts::LadderRung& rung : plan.routed.ladder) {
    rung.last_tokens = plan.gathered(rung.last_tokens);
    const Support support = rung.row->supports(plan.routed.problem);
    if (support) continue;
    throw Error(ErrorCode::kUnsupported, {.what = "a kernel does not take the tokens of all ranks",
                                          .tensor = "LayerOptions.max_tokens",
                                          .found = std::to_string(plan.options.max_tokens),
                                          .hint = support.reason()});
  }
}

void choose_routed_ladder(CudaPlan& plan) {
  experts::ExpertsProblem problem = plan.routed.problem;
  problem.max_tokens = plan.options.max_tokens;
  experts::LadderRequest request = ladder_request(plan, problem);
  request.shared_experts = plan.fused.slots();
  request.has_all_experts = plan.parallel.ep_size == 1;
  plan.routed.ladder = build_ladder(request, plan.summary.rows);
  spread_ladder(plan);
  if (plan.options.determinism == Determinism::kUnordered) add_in_any_order(plan);
}

// A forced kernel is meant for the routed experts; parts that it cannot run choose another.
void choose_other_ladder(const CudaPlan& plan, CudaMlpPlan& part) {
  experts::LadderRequest request = ladder_request(plan, part.problem);
  if (!request.kernel.empty()) {
    if (!experts::find_device_row(request.kernel).supports(part.problem)) request.kernel.clear();
  }
  std::vector<PlanRow> verdicts;
  part.ladder = build_ladder(request, verdicts);
}

// Adapters need kernels that the layer's own may lack, in all parts that take some.
void choose_adapter_kernels(CudaPlan& plan) {
  if (!plan.takes_adapters()) return;
  PartChecks checks(plan.summary.rows);
  const auto choose = [&](CudaMlpPlan& part) {
    const Support support = plan_adapters(part);
    checks.need(static_cast<bool>(support), "adapters", support.reason());
    if (!support || part.adapters.empty()) return;
    const AdapterRung& last = part.adapters.back();
    plan.summary.rows.push_back(
        {.table = "adapters",
         .name = std::string(last.row->name),
         .chosen = true,
         .reason = last.in_one_pass ? "their terms join the sums of the same launches"
                                    : "computes rows with adapters anew, behind the others"});
  };
  choose(plan.routed);
  if (plan.shared) choose(*plan.shared);
  checks.throw_if_any();
}

// Lays out the codes of parts whose columns have an order.
void lay_out_codes(CudaPlan& plan, MlpProblems& problems) {
  const auto lay_out = [&](experts::ExpertsProblem& problem, MlpOrder LayerOrders::*part,
                           const char* name) {
    if (is_plain(problem.weight_dtype) || !problem.quant.has_column_order) return;
    set_order(plan.orders ? *plan.orders.*part : assumed_order(problem), problem);
    const char* const known = plan.orders ? "" : ", as is assumed without weights";
    plan.summary.rows.push_back({.table = "order of columns",
                                 .name = name,
                                 .chosen = true,
                                 .reason = describe_order(problem) + known});
  };
  lay_out(problems.routed, &LayerOrders::routed, "routed experts");
  if (problems.shared) lay_out(*problems.shared, &LayerOrders::shared, "shared experts");
}

// The parts of the plan must be placed before.
SumEnd plan_end(const CudaPlan& plan) {
  const MoeSpec& spec = plan.spec;
  const bool mixes = shared_facts(spec).mixes();
  const bool has_rest = spec.num_zero_experts > 0 || spec.has_output_bias;
  const bool only_routed = !plan.shared && !plan.residual && !mixes;
  const bool here = !plan.gathers_rows();  // a slot's row is, not just the sum of all ranks' slots
  const bool is_latent = spec.latent.size != 0;
  // Slots of fused shared experts count as plain slots if the routed sum is not changed afterwards.
  const bool plain_slots =
      plan.fused.slots() == 0 || (spec.output_scale == 1 && spec.weight_on == WeightOn::kOutput);
  return {.only_slots = here && only_routed && !has_rest && !is_latent && plain_slots &&
                        !plan.part.has_replicas() && !plan.has_rows_of_slots(),
          .writes_output = here && only_routed && !has_rest && !is_latent &&
                           plan.num_slots() == 1 && !plan.sums_ranks(),
          // Sums are read in groups of four.
          .rounds_sums = only_routed && !(has_rest && plan.part.adds_rest) &&
                         (!is_latent || spec.hidden_size % 4 == 0)};
}

void fill_plan(CudaPlan& plan, const CudaPlanRequest& request) {
  const MoeSpec& spec = plan.spec;
  validate(spec);
  validate(plan.parallel);
  check_options(plan.options, plan.device);
  plan.summary.device = fmt::format("cuda:{} {}, {} multiprocessors", plan.device.ordinal,
                                    plan.device.name, plan.device.multiprocessors);
  plan.part = plan_rank_part(spec, plan.parallel, plan.options.spare_experts);
  PartChecks checks(plan.summary.rows);
  check_parts(plan, checks, plan.summary.rows);
  plan_sum_over_ranks(plan, request.tensor_communicator, checks);
  choose_dispatcher(plan, request.communicator, checks);
  checks.throw_if_any();
  check_gathered_tokens(plan);
  plan.weighs_rows = spec.weight_on == WeightOn::kInput && !is_plain(spec.weight_dtype) &&
                     weight_may_change_codes(spec.quant);
  MlpProblems problems = mlp_problems({.spec = spec,
                                       .part = plan.part,
                                       .max_tokens = plan.options.max_tokens,
                                       .target = plan.device});
  problems.routed.max_tokens = plan.gathered(plan.options.max_tokens);
  lay_out_codes(plan, problems);
  problems.routed.scale_span = plan.scale_span;
  if (problems.shared) problems.shared->scale_span = plan.scale_span;
  plan.routed = mlp_plan(problems.routed);
  if (problems.shared) place_shared(plan, *problems.shared);
  if (problems.residual) plan.residual = mlp_plan(*problems.residual);
  plan.end = plan_end(plan);
  choose_one_launch(plan);
  if (plan.routed.problem.num_local_experts > 0) choose_routed_ladder(plan);
  if (plan.shared) choose_other_ladder(plan, *plan.shared);
  if (plan.residual) choose_other_ladder(plan, *plan.residual);
  choose_adapter_kernels(plan);
  choose_launches(plan);
  if (plan.gathers_rows()) list_exchange(plan);
  plan.stages = declare_stages(plan);
  summarise(plan);
}

CudaPlan plan_of(const CudaPlanRequest& request) {
  CudaPlan plan;
  plan.spec = request.spec;
  plan.parallel = request.parallel;
  plan.options = request.options;
  plan.device = request.device;
  plan.shared_form = request.shared;
  plan.orders = request.orders;
  plan.scale_span = request.scale_span;
  return plan;
}

}  // namespace

CudaMlpPlan mlp_plan(const experts::ExpertsProblem& problem) {
  const DType dtype = row_dtype_of(problem.weight_dtype);
  return {.problem = problem,
          .ladder = {},
          .row_dtype = dtype,
          .row_stride = padded_row(problem.hidden_size, dtype)};
}

bool CudaMlpPlan::quantises() const {
  return !is_plain(problem.weight_dtype) && problem.quant.activations != ActivationScale::kNone;
}

bool CudaMlpPlan::has_own_rows() const {
  if (is_plain(problem.weight_dtype)) return false;
  const QuantSpec& quant = problem.quant;
  return quant.has_column_order || quant.has_column_factors ||
         (problem.has_float_rows && !quantises());
}

bool CudaMlpPlan::runs_by_reference() const {
  return !ladder.empty() && ladder.back().row->is_reference;
}

int32_t CudaPlan::num_ids() const {
  const int64_t routed_ids =
      part.has_replicas() ? part.placement().num_physical() : spec.num_experts;
  return static_cast<int32_t>(routed_ids) + fused.slots();
}

CudaPlan plan_cuda_layer(const CudaPlanRequest& request) {
  CudaPlan plan = plan_of(request);
  fill_plan(plan, request);
  return plan;
}

Plan summarise_cuda_plan(const CudaPlanRequest& request) {
  CudaPlan plan = plan_of(request);
  try {
    fill_plan(plan, request);
  } catch (const Error& error) {
    // The rows gathered so far already say why nothing fits.
    if (error.code() != ErrorCode::kUnsupported) throw;
  }
  return std::move(plan.summary);
}

}  // namespace conclave::inline v0
