#include "capi/own_router.h"

#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/structs.h"
#include "core/shared_facts.h"

#include "conclave/error.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>
#include <utility>

namespace conclave::inline v0::capi {
namespace {

constexpr size_t kMostScratch = size_t{1} << 30;

// Values that no function writes by chance: an id far from every expert, and a NaN of its own.
constexpr int32_t kUnwrittenId = std::numeric_limits<int32_t>::min() + 0x51A7;
constexpr uint32_t kUnwrittenBits = 0x7FC5'1A7E;

void mark(float* weights, int64_t count) {
  std::fill_n(weights, count, std::bit_cast<float>(kUnwrittenBits));
}

// The first of `count` elements that was left as it was marked, or -1.
int64_t find_unwritten(const int32_t* ids, int64_t count) {
  const int32_t* const found = std::find(ids, ids + count, kUnwrittenId);
  return found == ids + count ? -1 : found - ids;
}
int64_t find_unwritten(const float* weights, int64_t count) {
  const float* const found = std::find_if(weights, weights + count, [](float weight) {
    return std::bit_cast<uint32_t>(weight) == kUnwrittenBits;
  });
  return found == weights + count ? -1 : found - weights;
}

template <class Element>
void check_written(const std::string& router, const char* name, const Element* rows, int64_t count,
                   int64_t cols, int64_t first_token) {
  const int64_t at = find_unwritten(rows, count * cols);
  if (at < 0) return;
  throw Error(
      ErrorCode::kState,
      {.what = "router " + router + " left an element unwritten, at token " +
               std::to_string(first_token + at / cols) + ", slot " + std::to_string(at % cols),
       .tensor = name,
       .expected = std::to_string(count) + " rows of " + std::to_string(cols)});
}

[[noreturn]] void throw_failure(const std::string& router, conclave_status status,
                                const char* reason) {
  throw Error(find_code(status).value_or(ErrorCode::kState),
              {.what = "router " + router + " failed" +
                       (reason == nullptr ? "" : ": " + std::string(reason)),
               .tensor = "router.route",
               .found = "status " + std::to_string(status)});
}

}  // namespace

RouterFunction::RouterFunction(const conclave_own_router& router) : given_(router) {
  required(router.name, "router.name");
  required(router.route, "router.route");
  if (router.scratch_bytes <= kMostScratch) return;
  throw Error(ErrorCode::kInvalidArgument, {.what = "a router asks for too much memory",
                                            .tensor = "router.scratch_bytes",
                                            .found = std::to_string(router.scratch_bytes),
                                            .limit = "0 to " + std::to_string(kMostScratch)});
}

RouterFunction::~RouterFunction() {
  if (is_kept_ && given_.release != nullptr) given_.release(given_.user);
}

CRouter::CRouter(std::shared_ptr<const RouterFunction> function, const MoeSpec& spec)
    : function_(std::move(function)),
      name_(spec.router.name),
      top_k_(spec.top_k),
      num_zero_experts_(spec.num_zero_experts),
      num_shared_(shared_facts(spec).by_router() ? spec.shared.count : 0) {}

size_t CRouter::scratch_bytes(int32_t /*workers*/) const {
  return function_->given().scratch_bytes;
}

RouterStats CRouter::route(const RouterInput& input, const RouterOutput& output,
                           Executor& /*executor*/) const {
  const int64_t tokens = input.num_tokens;
  if (tokens == 0) return {};
  float* const shared = num_shared_ > 0 ? output.shared_weights : nullptr;
  std::fill_n(output.topk_ids, tokens * top_k_, kUnwrittenId);
  mark(output.topk_weights, tokens * top_k_);
  if (shared != nullptr) mark(shared, tokens * num_shared_);

  const conclave_own_router& given = function_->given();
  conclave_route_call call{.struct_size = sizeof(conclave_route_call),
                           .num_tokens = tokens,
                           .top_k = top_k_,
                           .num_experts = input.num_experts,
                           .num_zero_experts = num_zero_experts_,
                           .num_logits = input.num_logits,
                           .num_shared = shared != nullptr ? num_shared_ : 0,
                           .first_token = input.first_token,
                           .logits = input.logits,
                           .token_ids = input.token_ids,
                           .given_ids = input.given_ids,
                           .selection_bias = input.weights.selection_bias,
                           .expert_scale = input.weights.expert_scale,
                           .global_scale = input.weights.global_scale,
                           .banned = input.banned,
                           .banned_stride = input.banned_stride,
                           .scratch = given.scratch_bytes > 0 ? input.scratch.data() : nullptr,
                           .topk_ids = output.topk_ids,
                           .topk_weights = output.topk_weights,
                           .shared_weights = shared,
                           .tokens_without_finite_logit = 0,
                           .reason = nullptr};
  const conclave_status status = given.route(given.user, &call);
  if (status != CONCLAVE_OK) throw_failure(name_, status, call.reason);
  check_written(name_, "topk_ids", output.topk_ids, tokens, top_k_, input.first_token);
  check_written(name_, "topk_weights", output.topk_weights, tokens, top_k_, input.first_token);
  if (shared != nullptr) {
    check_written(name_, "shared_weights", shared, tokens, num_shared_, input.first_token);
  }
  const int64_t counted = call.tokens_without_finite_logit;
  if (counted >= 0 && counted <= tokens) return {.tokens_without_finite_logit = counted};
  throw Error(ErrorCode::kState, {.what = "router " + name_ + " counted tokens that are not there",
                                  .tensor = "tokens_without_finite_logit",
                                  .found = std::to_string(counted),
                                  .limit = "0 to " + std::to_string(tokens)});
}

}  // namespace conclave::inline v0::capi

namespace capi = conclave::capi;

conclave_status conclave_context_add_router(conclave_context* context,
                                            const conclave_own_router* router) noexcept {
  return capi::guarded([&] {
    conclave::Context& to = *capi::required(context, "context").state->context;
    const auto function = std::make_shared<capi::RouterFunction>(capi::take(router, "router"));
    to.add_router(function->given().name, [function](const conclave::MoeSpec& spec) {
      return std::make_unique<capi::CRouter>(function, spec);
    });
    function->keep();
  });
}
