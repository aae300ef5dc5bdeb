#include "conclave/token_router.h"

#include "core/check_disjoint.h"
#include "core/shared_facts.h"
#include "layer/arguments.h"
#include "layer/choice_limits.h"
#include "layer/engine.h"
#include "routing/expert_budget.h"
#include "routing/limits.h"
#include "routing/router.h"
#include "routing/router_tensors.h"

#include "conclave/error.h"
#include "conclave/routing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

constexpr size_t kScratchAlignment = 64;

// Fills in sizes of matrices: routing does not use them, but a spec without them is not valid.
MoeSpec with_sizes(MoeSpec spec) {
  if (spec.hidden_size == 0) spec.hidden_size = 1;
  if (spec.intermediate_size == 0) spec.intermediate_size = 1;
  if (shared_facts(spec).is_there && spec.shared.intermediate_size == 0) {
    spec.shared.intermediate_size = 1;
  }
  return spec;
}

std::unique_ptr<Router> make_host_router(const Context& context, const MoeSpec& spec) {
  const std::string& name = spec.router.name;
  if (const RouterFactory* custom = context.find_router(name)) {
    std::unique_ptr<Router> router = (*custom)(spec);
    if (router) return router;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a router factory returned null", .found = name});
  }
  const routing::RouterRow& row = routing::router_catalog().find(name, "router");
  const Support support = row.supports(spec);
  if (support) return row.make(spec);
  throw Error(ErrorCode::kUnsupported,
              {.what = "router " + name + " cannot run this", .found = support.reason()});
}

void check_dense(std::string_view name, const TensorView& tensor, const Shape& shape, DType dtype) {
  check_matrix(name, tensor, shape, {dtype});
  if (tensor.row_stride == 0 || tensor.row_stride == shape[1]) return;
  throw Error(ErrorCode::kStride, {.what = "an argument that is written must be dense",
                                   .tensor = std::string(name),
                                   .expected = "a row stride of " + std::to_string(shape[1]),
                                   .found = std::to_string(tensor.row_stride)});
}

void check_given(std::string_view name, bool needed, const ConstTensorView& tensor) {
  if (needed == !tensor.empty()) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = needed ? "the router needs this argument"
                              : "the router has no use for this argument",
               .tensor = std::string(name)});
}

using OwnTensors = std::vector<routing::SizedRouterTensor>;

// Those that a call brings: a spec's own values are not among them.
OwnTensors tensors_of_calls(const MoeSpec& spec) {
  OwnTensors tensors = routing::router_tensors_of(spec);
  std::erase_if(tensors, [](const routing::SizedRouterTensor& own) { return !own.tensor->id; });
  return tensors;
}

ConstTensorView view_of(const routing::RouterTensor& tensor, const RouteArgs& args) {
  return routing::find_view(args, args.tensors, tensor.call_field, tensor.name);
}

void check_own_tensor(const routing::SizedRouterTensor& own, const ConstTensorView& view) {
  const DType dtype =
      own.tensor->element == routing::RouterElement::kIndex ? DType::kI32 : DType::kF32;
  if (own.tensor->is_vector) return check_vector(own.tensor->name, view, own.size.cols, {dtype});
  check_dense(own.tensor->name,
              {const_cast<void*>(view.data), view.dtype, view.shape, view.row_stride},
              {own.size.rows, own.size.cols}, dtype);
}

void check_own_tensors(const OwnTensors& tensors, const RouteArgs& args) {
  routing::check_router_tensor_names(args.tensors);
  for (const routing::RouterTensor* tensor : routing::all_router_tensors()) {
    const auto own = std::ranges::find(tensors, tensor, &routing::SizedRouterTensor::tensor);
    const bool is_read = own != tensors.end();
    const ConstTensorView view = view_of(*tensor, args);
    if (is_read && tensor->is_optional && view.empty()) continue;
    check_given(tensor->name, is_read, view);
    if (is_read) check_own_tensor(*own, view);
  }
}

struct NamedView {
  std::string_view name;
  ConstTensorView view;
};

// Rows of one token are written while those of others are read. What the router has no use for was
// not checked and is not looked at.
void check_overlaps(const MoeSpec& spec, const routing::RouterTraits& traits,
                    const RouteArgs& args) {
  std::vector<NamedView> outputs = {{"topk_ids", args.topk_ids},
                                    {"topk_weights", args.topk_weights}};
  if (shared_facts(spec).by_router()) outputs.push_back({"shared_weights", args.shared_weights});
  std::vector<NamedView> inputs = {{"token_ids", args.token_ids},
                                   {"selection_bias", args.selection_bias},
                                   {"expert_scale", args.expert_scale},
                                   {"global_scale", args.global_scale},
                                   {"banned_experts", args.banned_experts}};
  if (traits.reads_logits) inputs.push_back({"logits", args.logits});
  for (const routing::RouterTensor* tensor : routing::all_router_tensors()) {
    inputs.push_back({tensor->name, view_of(*tensor, args)});
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (const NamedView& input : inputs) {
      check_disjoint(outputs[i].name, outputs[i].view, input.name, input.view);
    }
    for (size_t j = 0; j < i; ++j) {
      check_disjoint(outputs[i].name, outputs[i].view, outputs[j].name, outputs[j].view);
    }
  }
}

void check_call(const MoeSpec& spec, const routing::RouterTraits& traits, const OwnTensors& own,
                const RouteArgs& args) {
  const int64_t tokens = args.topk_ids.shape.rank() == 2 ? args.topk_ids.shape[0] : -1;
  const RouterSpec& router = spec.router;
  check_dense("topk_ids", args.topk_ids, {std::max<int64_t>(tokens, 0), spec.top_k}, DType::kI32);
  check_dense("topk_weights", args.topk_weights, {tokens, spec.top_k}, DType::kF32);
  if (traits.reads_logits) {
    check_matrix("logits", args.logits, {tokens, num_logits(spec)},
                 {DType::kF32, DType::kF16, DType::kBF16});
  }
  check_given("selection_bias", router.has_selection_bias, args.selection_bias);
  check_given("expert_scale", router.has_expert_scale, args.expert_scale);
  check_given("global_scale", router.has_global_scale, args.global_scale);
  const auto floats = {DType::kF32, DType::kF16, DType::kBF16};
  const int64_t columns = spec.num_experts + spec.num_zero_experts;
  if (router.has_selection_bias) {
    check_vector("selection_bias", args.selection_bias, columns, floats);
  }
  if (router.has_expert_scale) {
    check_vector("expert_scale", args.expert_scale, spec.num_experts, floats);
  }
  if (router.has_global_scale) check_vector("global_scale", args.global_scale, 1, floats);
  check_own_tensors(own, args);
  if (traits.token_ids == routing::TokenIds::kUnused) {
    check_given("token_ids", false, args.token_ids);
  } else if (traits.token_ids == routing::TokenIds::kNeeded || !args.token_ids.empty()) {
    check_vector("token_ids", args.token_ids, tokens, {DType::kI32, DType::kI64});
  }
  if (shared_facts(spec).by_router()) {
    check_dense("shared_weights", args.shared_weights, {tokens, spec.shared.count}, DType::kF32);
  }
}

// Dense float32 values of an argument, converted only if they are anything else.
class Floats {
 public:
  explicit Floats(const ConstTensorView& view) {
    if (view.empty()) return;
    const bool is_dense =
        view.shape.rank() == 1 || view.row_stride == 0 || view.row_stride == view.shape[1];
    if (view.dtype == DType::kF32 && is_dense) {
      data_ = static_cast<const float*>(view.data);
      return;
    }
    converted_.resize(static_cast<size_t>(view.shape.num_elements()));
    convert(view, {.data = converted_.data(), .dtype = DType::kF32, .shape = view.shape});
    data_ = converted_.data();
  }
  const float* data() const { return data_; }

 private:
  std::vector<float> converted_;
  const float* data_ = nullptr;
};

void check_bias(const float* bias, int64_t count) {
  for (int64_t i = 0; bias != nullptr && i < count; ++i) {
    if (!std::isnan(bias[i])) continue;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "the selection bias is not a number at " + std::to_string(i),
                 .tensor = "selection_bias"});
  }
}

// The rows of a tensor from `first` on.
ConstTensorView rows_of(const ConstTensorView& view, const routing::RouterTensorSize& size,
                        int64_t first, int64_t count) {
  const int64_t skipped = first * size.cols * byte_size(view.dtype);
  return {.data = static_cast<const std::byte*>(view.data) + skipped,
          .dtype = view.dtype,
          .shape = {count, size.cols}};
}

std::vector<int32_t> checked_token_ids(const routing::RouterTraits& traits, const RouteArgs& args) {
  std::vector<int32_t> ids;
  if (args.token_ids.empty()) return ids;
  const int64_t limit = traits.num_token_ids > 0 ? traits.num_token_ids - 1
                                                 : int64_t{std::numeric_limits<int32_t>::max()};
  for (int64_t token = 0; token < args.token_ids.shape[0]; ++token) {
    const int64_t id = load_token_id(args.token_ids, token);
    if (id < 0 || id > limit) {
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = "a token id is out of range at token " + std::to_string(token),
                   .tensor = "token_ids",
                   .found = std::to_string(id),
                   .limit = "0 to " + std::to_string(limit)});
    }
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

// Checks the values that the call uses: rows of other token ids may hold anything.
void check_values(const MoeSpec& spec, const routing::SizedRouterTensor& own,
                  const ConstTensorView& view, const std::vector<int32_t>& token_ids) {
  const routing::RouterTensor& tensor = *own.tensor;
  if (tensor.check == nullptr || view.empty()) return;
  const std::string name(tensor.name);
  if (!tensor.is_by_token_id) {
    return tensor.check(spec, rows_of(view, own.size, 0, own.size.rows), 0, name);
  }
  for (const int32_t id : token_ids) {
    tensor.check(spec, rows_of(view, own.size, id, 1), id, name);
  }
}

// A checked call as the router takes it.
struct HostCall {
  const MoeSpec& spec;
  const Router& router;  // for as many choices as the call asks for
  Executor& executor;
  const float* logits;
  const int32_t* token_ids;
  RouterWeights weights;
  const RouteArgs& args;

  int64_t num_tokens() const { return args.topk_ids.shape[0]; }
  int64_t choices() const { return args.top_k != 0 ? args.top_k : spec.top_k; }
  int32_t* ids() const { return static_cast<int32_t*>(args.topk_ids.data); }
  float* topk_weights() const { return static_cast<float*>(args.topk_weights.data); }
};

// Routers of the application may write anything; sums and bans are looked up by these ids.
void check_chosen(const HostCall& call) {
  const int64_t limit = call.spec.num_experts + call.spec.num_zero_experts;
  for (int64_t index = 0; index < call.num_tokens() * call.choices(); ++index) {
    const int64_t id = call.ids()[index];
    if (id >= -1 && id < limit) continue;
    throw Error(ErrorCode::kExpertId, {.what = "router " + call.spec.router.name +
                                               " chose an expert that does not exist, at token " +
                                               std::to_string(index / call.choices()) + ", slot " +
                                               std::to_string(index % call.choices()),
                                       .found = std::to_string(id),
                                       .limit = "-1 to " + std::to_string(limit - 1)});
  }
}

void route_rows(const HostCall& call, const routing::Banned& banned) {
  const MoeSpec& spec = call.spec;
  const int64_t tokens = call.num_tokens();
  std::vector<float> masked;
  const float* logits = call.logits;
  if (banned.any() && logits != nullptr) {
    masked.resize(static_cast<size_t>(tokens * num_logits(spec)));
    routing::mask_logits(logits, tokens, num_logits(spec), spec.num_experts + spec.num_zero_experts,
                         banned, masked.data());
    logits = masked.data();
  }
  const size_t bytes = call.router.scratch_bytes(call.executor.concurrency());
  std::vector<std::byte> scratch(bytes + kScratchAlignment);
  const auto misaligned = reinterpret_cast<uintptr_t>(scratch.data()) % kScratchAlignment;
  std::byte* aligned = scratch.data() + (kScratchAlignment - misaligned) % kScratchAlignment;
  call.router.route({.num_tokens = tokens,
                     .num_experts = spec.num_experts,
                     .num_logits = num_logits(spec),
                     .logits = logits,
                     .token_ids = call.token_ids,
                     .weights = call.weights,
                     .banned = banned.rows,
                     .banned_stride = banned.stride,
                     .table_columns = spec.top_k,
                     .scratch = {aligned, bytes}},
                    {.topk_ids = call.ids(),
                     .topk_weights = call.topk_weights(),
                     .shared_weights = static_cast<float*>(call.args.shared_weights.data)},
                    call.executor);
  check_chosen(call);
  if (call.choices() < spec.top_k) {
    routing::spread_slots(tokens, call.choices(), spec.top_k, call.ids(), call.topk_weights());
  }
  if (banned.any()) {
    routing::drop_banned(tokens, spec.top_k, banned, call.ids(), call.topk_weights());
    if (routing::bans_leave_groups(spec)) {
      routing::drop_weightless(tokens, spec.top_k, call.ids(), call.topk_weights());
    }
  }
}

// Routes once more where the choices of all tokens are more experts than the budget.
void route_within_budget(const HostCall& call, const routing::Banned& banned) {
  const MoeSpec& spec = call.spec;
  routing::ExpertWeightSums sums(spec.num_experts);
  sums.add({.num_tokens = call.num_tokens(),
            .top_k = spec.top_k,
            .topk_ids = call.ids(),
            .topk_weights = call.topk_weights()});
  if (sums.num_used() <= call.args.expert_budget) return;
  const routing::ExpertBans bans(sums.left_out(call.args.expert_budget, spec.num_zero_experts),
                                 banned, call.num_tokens());
  route_rows(call, bans.banned());
}

void route_on_host(const Context& context, const MoeSpec& spec, const routing::RouterTraits& traits,
                   const OwnTensors& own, const Router& router, const RouteArgs& args) {
  const Floats logits(args.logits);
  const Floats bias(args.selection_bias);
  const Floats expert_scale(args.expert_scale);
  const Floats global_scale(args.global_scale);
  check_bias(bias.data(), spec.num_experts + spec.num_zero_experts);
  const std::vector<int32_t> token_ids = checked_token_ids(traits, args);
  RouterWeights weights{.selection_bias = bias.data(),
                        .expert_scale = expert_scale.data(),
                        .global_scale = global_scale.data()};
  for (const routing::SizedRouterTensor& tensor : own) {
    const ConstTensorView view = view_of(*tensor.tensor, args);
    check_values(spec, tensor, view, token_ids);
    routing::set_router_tensor(tensor, view.data, weights);
  }
  const HostCall call{.spec = spec,
                      .router = router,
                      .executor = context.executor(),
                      .logits = logits.data(),
                      .token_ids = token_ids.empty() ? nullptr : token_ids.data(),
                      .weights = weights,
                      .args = args};
  const routing::Banned banned = bans_of(args.banned_experts);
  route_rows(call, banned);
  if (args.expert_budget != 0) route_within_budget(call, banned);
}

[[noreturn]] void refuse_router(const Support& support) {
  throw Error(ErrorCode::kUnsupported, {.what = "the device cannot run this router",
                                        .found = support.reason(),
                                        .hint = "route on the CPU"});
}

}  // namespace

struct TokenRouter::Impl {
  const Context& context;
  MoeSpec spec;
  routing::RouterTraits traits;
  OwnTensors own;
  std::unique_ptr<Router> host;  // null on a device
  RouteFunction device = {};     // empty on the host
  std::unique_ptr<routing::FewerChoices> fewer = nullptr;

  const Router& router_of(const RouteArgs& args) const {
    if (args.top_k == 0 || args.top_k == spec.top_k) return *host;
    return fewer->of(args.top_k, std::numeric_limits<size_t>::max(), 1);
  }
};

TokenRouter::TokenRouter(const Context& context, const MoeSpec& spec)
    : impl_(new Impl{.context = context,
                     .spec = with_sizes(spec),
                     .traits = routing::router_traits(spec),
                     .own = tensors_of_calls(spec),
                     .host = nullptr}) {
  const EngineRow& engine = engine_row(context);
  validate(impl_->spec);
  if (engine.make_route == nullptr) {
    impl_->host = make_host_router(context, impl_->spec);
    impl_->fewer = std::make_unique<routing::FewerChoices>(
        impl_->spec, [&context](const MoeSpec& fewer) { return make_host_router(context, fewer); });
    return;
  }
  if (const Support support = engine.routes(impl_->spec); !support) refuse_router(support);
  impl_->device = engine.make_route(parse_device(context.device()).ordinal, impl_->spec);
}

TokenRouter::TokenRouter(TokenRouter&&) noexcept = default;
TokenRouter& TokenRouter::operator=(TokenRouter&&) noexcept = default;
TokenRouter::~TokenRouter() = default;

const MoeSpec& TokenRouter::spec() const noexcept { return impl_->spec; }

void TokenRouter::route(const RouteArgs& args) const {
  check_call(impl_->spec, impl_->traits, impl_->own, args);
  const ChoiceLimits limits = ChoiceLimits::of(args);
  const int64_t tokens = args.topk_ids.shape[0];
  if (!impl_->host) {
    refuse_choice_limits(limits);
    check_overlaps(impl_->spec, impl_->traits, args);
    if (tokens != 0) impl_->device(args);
    return;
  }
  check_choice_limits(limits, impl_->spec, tokens, tokens);
  check_overlaps(impl_->spec, impl_->traits, args);
  if (tokens != 0) {
    route_on_host(impl_->context, impl_->spec, impl_->traits, impl_->own, impl_->router_of(args),
                  args);
  }
}

}  // namespace conclave::inline v0
