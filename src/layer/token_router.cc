#include "conclave/token_router.h"

#include "layer/arguments.h"
#include "layer/engine.h"
#include "routing/router.h"

#include "conclave/error.h"
#include "conclave/routing.h"

#include <algorithm>
#include <cmath>
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
  if (spec.shared.mode != SharedMode::kNone && spec.shared.intermediate_size == 0) {
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

void check_call(const MoeSpec& spec, const routing::RouterTraits& traits, const RouteArgs& args) {
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
  check_given("hash_table", traits.has_hash_table, args.hash_table);
  const auto floats = {DType::kF32, DType::kF16, DType::kBF16};
  const int64_t columns = spec.num_experts + spec.num_zero_experts;
  if (router.has_selection_bias) {
    check_vector("selection_bias", args.selection_bias, columns, floats);
  }
  if (router.has_expert_scale) {
    check_vector("expert_scale", args.expert_scale, spec.num_experts, floats);
  }
  if (router.has_global_scale) check_vector("global_scale", args.global_scale, 1, floats);
  if (traits.has_hash_table) {
    check_dense("hash_table",
                {const_cast<void*>(args.hash_table.data), args.hash_table.dtype,
                 args.hash_table.shape, args.hash_table.row_stride},
                {router.vocab_size, spec.top_k}, DType::kI32);
    check_vector("token_ids", args.token_ids, tokens, {DType::kI32, DType::kI64});
  }
  if (spec.shared.mode == SharedMode::kRouterWeight) {
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

// Checks only the rows of the table that are used; the others may hold anything.
std::vector<int32_t> checked_token_ids(const MoeSpec& spec, const RouteArgs& args) {
  std::vector<int32_t> ids;
  if (args.token_ids.empty()) return ids;
  const auto* table = static_cast<const int32_t*>(args.hash_table.data);
  for (int64_t token = 0; token < args.token_ids.shape[0]; ++token) {
    const int64_t id = load_token_id(args.token_ids, token);
    if (id < 0 || id >= spec.router.vocab_size) {
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = "a token id is out of range at token " + std::to_string(token),
                   .tensor = "token_ids",
                   .found = std::to_string(id),
                   .limit = "0 to " + std::to_string(spec.router.vocab_size - 1)});
    }
    for (int64_t slot = 0; slot < spec.top_k; ++slot) {
      const int32_t expert = table[id * spec.top_k + slot];
      if (expert >= 0 && expert < spec.num_experts) continue;
      throw Error(ErrorCode::kExpertId,
                  {.what = "an entry of the table is no expert, in row " + std::to_string(id),
                   .tensor = "hash_table",
                   .found = std::to_string(expert),
                   .limit = "0 to " + std::to_string(spec.num_experts - 1)});
    }
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

void route_on_host(const Context& context, const MoeSpec& spec, const Router& router,
                   const RouteArgs& args) {
  const Floats logits(args.logits);
  const Floats bias(args.selection_bias);
  const Floats expert_scale(args.expert_scale);
  const Floats global_scale(args.global_scale);
  check_bias(bias.data(), spec.num_experts + spec.num_zero_experts);
  const std::vector<int32_t> token_ids = checked_token_ids(spec, args);
  Executor& executor = context.executor();
  const size_t bytes = router.scratch_bytes(executor.concurrency());
  std::vector<std::byte> scratch(bytes + kScratchAlignment);
  const auto misaligned = reinterpret_cast<uintptr_t>(scratch.data()) % kScratchAlignment;
  std::byte* aligned = scratch.data() + (kScratchAlignment - misaligned) % kScratchAlignment;
  router.route({.num_tokens = args.topk_ids.shape[0],
                .num_experts = spec.num_experts,
                .num_logits = num_logits(spec),
                .logits = logits.data(),
                .token_ids = token_ids.empty() ? nullptr : token_ids.data(),
                .weights = {.selection_bias = bias.data(),
                            .expert_scale = expert_scale.data(),
                            .global_scale = global_scale.data(),
                            .hash_table = static_cast<const int32_t*>(args.hash_table.data)},
                .scratch = {aligned, bytes}},
               {.topk_ids = static_cast<int32_t*>(args.topk_ids.data),
                .topk_weights = static_cast<float*>(args.topk_weights.data),
                .shared_weights = static_cast<float*>(args.shared_weights.data)},
               executor);
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
  std::unique_ptr<Router> host;  // null on a device
  RouteFunction device = {};     // empty on the host
};

TokenRouter::TokenRouter(const Context& context, const MoeSpec& spec)
    : impl_(new Impl{.context = context,
                     .spec = with_sizes(spec),
                     .traits = routing::router_traits(spec.router.name),
                     .host = nullptr}) {
  const EngineRow& engine = engine_row(context);
  validate(impl_->spec);
  if (engine.make_route == nullptr) {
    impl_->host = make_host_router(context, impl_->spec);
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
  check_call(impl_->spec, impl_->traits, args);
  if (args.topk_ids.shape[0] == 0) return;
  if (impl_->host) return route_on_host(impl_->context, impl_->spec, *impl_->host, args);
  impl_->device(args);
}

}  // namespace conclave::inline v0
