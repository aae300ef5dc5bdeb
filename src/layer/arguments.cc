#include "layer/arguments.h"

#include "core/check_disjoint.h"
#include "core/checked.h"
#include "core/row_stride.h"
#include "core/shared_facts.h"
#include "core/workspace_layout.h"
#include "layer/call_tensors.h"

#include "conclave/error.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0 {
namespace {

constexpr std::initializer_list<DType> kActivations = {DType::kF32, DType::kF16, DType::kBF16};
constexpr std::initializer_list<DType> kIds = {DType::kI32, DType::kI64};

void check_dtype(std::string_view name, DType dtype, std::initializer_list<DType> allowed) {
  std::string expected;
  for (const DType candidate : allowed) {
    if (dtype == candidate) return;
    expected += (expected.empty() ? "" : " or ") + std::string(to_string(candidate));
  }
  throw Error(ErrorCode::kDType, {.what = "an argument has the wrong type",
                                  .tensor = std::string(name),
                                  .expected = expected,
                                  .found = std::string(to_string(dtype))});
}

// In place means the same rows at the same addresses; any other overlap would be read after it was
// written.
bool same_rows(const ConstTensorView& a, const ConstTensorView& b) {
  return a.data == b.data && a.dtype == b.dtype && row_stride(a) == row_stride(b);
}

[[noreturn]] void refuse(const char* tensor, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, {.what = what, .tensor = tensor});
}

// The sources of routing that a call brings or its layer has.
struct RoutingSource {
  bool has_ids;
  bool has_weights;
  bool has_logits;
  bool has_gate;
  routing::RouterTraits router;
  bool runs_router;  // if no weights are given: a router adds nothing else to given ids

  RoutingSource(const ForwardArgs& args, const MoeSpec& spec, const routing::RouterTraits& traits)
      : has_ids(!args.topk_ids.empty()),
        has_weights(!args.topk_weights.empty()),
        has_logits(!args.router_logits.empty()),
        has_gate(spec.has_gate),
        router(traits),
        runs_router(!has_weights) {}
};

void check_routing_source(const ForwardArgs& args, const MoeSpec& spec,
                          const routing::RouterTraits& traits, int64_t tokens) {
  if (tokens == 0) return;
  const RoutingSource source(args, spec, traits);
  if (source.has_weights && !source.has_ids) {
    refuse("topk_ids", "topk_weights need topk_ids");
  }
  if (source.has_weights && shared_facts(spec).by_router()) {
    refuse("topk_weights",
           "the router weighs this layer's shared experts: give topk_ids without weights to replay "
           "choices");
  }
  if (source.has_weights && source.has_logits) {
    refuse("router_logits",
           "router_logits and topk_weights were both given: give one source of routing");
  }
  const bool needs_logits = source.runs_router && source.router.reads_logits;
  if (needs_logits && !source.has_logits && !source.has_gate) {
    refuse("router_logits",
           source.has_ids ? "this layer has no gate: topk_ids need topk_weights or router_logits"
                          : "this layer has no gate: give router_logits, or topk_ids with "
                            "topk_weights");
  }
  if (!args.router_input.empty() && (source.has_logits || !source.runs_router)) {
    refuse("router_input", "router_input feeds the gate, but the routing was given");
  }
  const bool makes_logits = source.runs_router && (source.has_logits || source.has_gate);
  if (!makes_logits && !args.captured_logits.empty()) {
    refuse("captured_logits", "no logits to capture: the routing was given");
  }
  const bool needs_token_ids = source.router.token_ids == routing::TokenIds::kNeeded;
  if (needs_token_ids && !source.has_ids && args.token_ids.empty()) {
    refuse("token_ids",
           "router " + spec.router.name + " chooses by token ids: give them, or topk_ids");
  }
}

// Throws for a token id that a router could not read: beyond those that it looks up, or outside
// int32. Ids of padding tokens do not count.
void check_token_ids(const ForwardArgs& args, const routing::RouterTraits& traits,
                     int64_t num_tokens) {
  if (args.token_ids.empty() || traits.token_ids == routing::TokenIds::kUnused) return;
  const int64_t limit = traits.num_token_ids > 0 ? traits.num_token_ids - 1
                                                 : int64_t{std::numeric_limits<int32_t>::max()};
  const auto* mask = static_cast<const uint8_t*>(args.padding_mask.data);
  for (int64_t token = 0; token < num_tokens; ++token) {
    if (!args.padding_mask.empty() && mask[token] == 0) continue;
    const int64_t id = load_token_id(args.token_ids, token);
    if (id >= 0 && id <= limit) continue;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a token id is out of range at token " + std::to_string(token),
                 .tensor = "token_ids",
                 .found = std::to_string(id),
                 .limit = "0 to " + std::to_string(limit)});
  }
}

struct NamedView {
  std::string_view name;
  ConstTensorView view;
};

ConstTensorView load_view(std::span<const int64_t> load) {
  return {.data = load.data(), .dtype = DType::kI64, .shape = {static_cast<int64_t>(load.size())}};
}

ConstTensorView workspace_view(const Workspace* workspace) {
  if (workspace == nullptr) return {};
  const std::span<const std::byte> memory = workspace->memory();
  return {
      .data = memory.data(), .dtype = DType::kU8, .shape = {static_cast<int64_t>(memory.size())}};
}

void check_overlaps(const ForwardArgs& args) {
  std::array<NamedView, kCallOutputs.size() + 2> outputs;
  std::ranges::transform(kCallOutputs, outputs.begin(), [&](const CallOutput& output) {
    return NamedView{output.name, args.*output.view};
  });
  outputs[kCallOutputs.size()] = {"expert_load", load_view(args.expert_load)};
  outputs.back() = {"workspace", workspace_view(args.workspace)};
  for (const NamedView& output : outputs) {
    for (const CallInput& input : kCallInputs) {
      const ConstTensorView& view = args.*input.view;
      const bool in_place = output.name == std::string_view("out") && same_rows(output.view, view);
      if (!in_place) check_disjoint(output.name, output.view, input.name, view);
    }
    for (const NamedView& other : outputs) {
      if (&other != &output) check_disjoint(output.name, output.view, other.name, other.view);
    }
  }
}

void check_optional(std::string_view name, const ConstTensorView& tensor, int64_t rows,
                    int64_t cols, std::initializer_list<DType> dtypes) {
  if (!tensor.empty()) check_matrix(name, tensor, {rows, cols}, dtypes);
}

int64_t count_tokens(const ForwardArgs& args, int64_t tokens) {
  if (args.num_tokens == nullptr) return tokens;
  if (*args.num_tokens >= 0 && *args.num_tokens <= tokens) return *args.num_tokens;
  throw Error(ErrorCode::kInvalidArgument, {.what = "*num_tokens is out of range",
                                            .tensor = "num_tokens",
                                            .found = std::to_string(*args.num_tokens),
                                            .limit = "0 to " + std::to_string(tokens)});
}

}  // namespace

void check_matrix(std::string_view name, const ConstTensorView& tensor, const Shape& shape,
                  std::initializer_list<DType> dtypes) {
  const int64_t rows = shape[0];
  const int64_t cols = shape[1];
  if (tensor.shape != shape) {
    throw Error(ErrorCode::kShape, {.what = "an argument has the wrong shape",
                                    .tensor = std::string(name),
                                    .expected = shape.to_string(),
                                    .found = tensor.shape.to_string()});
  }
  check_dtype(name, tensor.dtype, dtypes);
  if (tensor.row_stride != 0 && tensor.row_stride < cols) {
    throw Error(ErrorCode::kStride, {.what = "rows of an argument overlap each other",
                                     .tensor = std::string(name),
                                     .expected = "0 or at least " + std::to_string(cols),
                                     .found = std::to_string(tensor.row_stride)});
  }
  if (rows == 0) return;
  const auto elements = checked_mul(rows, row_stride(tensor));
  if (!elements || !checked_mul(*elements, byte_size(tensor.dtype))) {
    throw Error(ErrorCode::kStride, {.what = "rows of an argument lie beyond any address",
                                     .tensor = std::string(name),
                                     .expected = "rows x row_stride within 63 bits",
                                     .found = std::to_string(row_stride(tensor))});
  }
  if (tensor.data == nullptr) {
    throw Error(ErrorCode::kNullPointer,
                {.what = "an argument has no data", .tensor = std::string(name)});
  }
  const auto alignment = static_cast<uintptr_t>(byte_size(tensor.dtype));
  if (reinterpret_cast<uintptr_t>(tensor.data) % alignment != 0) {
    throw Error(ErrorCode::kMisaligned, {.what = "an argument is not aligned to its element",
                                         .tensor = std::string(name),
                                         .expected = "a multiple of " + std::to_string(alignment)});
  }
}

void check_vector(std::string_view name, const ConstTensorView& tensor, int64_t size,
                  std::initializer_list<DType> dtypes) {
  check_dtype(name, tensor.dtype, dtypes);
  if (tensor.shape != Shape{size}) {
    throw Error(ErrorCode::kShape, {.what = "an argument has the wrong shape",
                                    .tensor = std::string(name),
                                    .expected = Shape{size}.to_string(),
                                    .found = tensor.shape.to_string()});
  }
  const auto alignment = static_cast<uintptr_t>(byte_size(tensor.dtype));
  if (reinterpret_cast<uintptr_t>(tensor.data) % alignment != 0) {
    throw Error(ErrorCode::kMisaligned, {.what = "an argument is not aligned to its element",
                                         .tensor = std::string(name),
                                         .expected = "a multiple of " + std::to_string(alignment)});
  }
}

void check_tensors(const ForwardArgs& args, const MoeSpec& spec,
                   const routing::RouterTraits& traits) {
  if (args.hidden.shape.rank() != 2) {
    throw Error(ErrorCode::kShape, {.what = "an argument has the wrong shape",
                                    .tensor = "hidden",
                                    .expected = "[T, " + std::to_string(spec.hidden_size) + "]",
                                    .found = args.hidden.shape.to_string()});
  }
  const int64_t tokens = args.hidden.shape[0];
  const int64_t hidden = spec.hidden_size;
  check_matrix("hidden", args.hidden, {tokens, hidden}, kActivations);
  check_matrix("out", args.out, {tokens, hidden}, kActivations);
  check_routing_source(args, spec, traits, tokens);
  check_optional("router_logits", args.router_logits, tokens, num_logits(spec), kActivations);
  const int64_t slots = num_slots(spec);
  check_optional("topk_ids", args.topk_ids, tokens, slots, kIds);
  check_optional("topk_weights", args.topk_weights, tokens, slots, kActivations);
  check_optional("residual_input", args.residual_input, tokens, hidden, kActivations);
  check_optional("router_input", args.router_input, tokens, hidden, kActivations);
  check_optional("shared_out", args.shared_out, tokens, hidden, kActivations);
  check_optional("captured_logits", args.captured_logits, tokens, num_logits(spec), {DType::kF32});
  check_optional("captured_ids", args.captured_ids, tokens, slots, {DType::kI32});
  check_optional("captured_weights", args.captured_weights, tokens, slots, {DType::kF32});
  if (!args.shared_out.empty() && !shared_facts(spec).is_there) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "this layer has no shared experts", .tensor = "shared_out"});
  }
  if (!args.residual_input.empty() && spec.residual.intermediate_size == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "this layer has no residual MLP", .tensor = "residual_input"});
  }
  if (!args.padding_mask.empty()) {
    check_vector("padding_mask", args.padding_mask, tokens, {DType::kBool});
  }
  if (!args.token_ids.empty()) check_vector("token_ids", args.token_ids, tokens, kIds);
  if (!args.adapter_ids.empty()) check_vector("adapter_ids", args.adapter_ids, tokens, kIds);
  if (!args.expert_load.empty() &&
      static_cast<int64_t>(args.expert_load.size()) != spec.num_experts) {
    throw Error(ErrorCode::kShape, {.what = "an argument has the wrong shape",
                                    .tensor = "expert_load",
                                    .expected = Shape{spec.num_experts}.to_string(),
                                    .found = std::to_string(args.expert_load.size())});
  }
  check_overlaps(args);
}

void check_rank_tokens(const ForwardArgs& args, const ParallelSpec& parallel) {
  const std::span<const int64_t> given = args.rank_tokens;
  if (given.empty()) return;
  if (static_cast<int64_t>(given.size()) != parallel.ep_size) {
    throw Error(ErrorCode::kShape, {.what = "an argument has the wrong shape",
                                    .tensor = "rank_tokens",
                                    .expected = Shape{parallel.ep_size}.to_string(),
                                    .found = std::to_string(given.size())});
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  for (size_t rank = 0; rank < given.size(); ++rank) {
    if (given[rank] >= 0 && given[rank] <= kMost) continue;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a number of tokens is out of range for rank " + std::to_string(rank),
                 .tensor = "rank_tokens",
                 .found = std::to_string(given[rank]),
                 .limit = "0 to " + std::to_string(kMost)});
  }
  const int64_t own = given[static_cast<size_t>(parallel.ep_rank)];
  const int64_t rows = args.hidden.shape[0];
  if (own == rows) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "rank " + std::to_string(parallel.ep_rank) + ", this one, has other rows",
               .tensor = "rank_tokens",
               .expected = std::to_string(rows) + ", the rows of hidden",
               .found = std::to_string(own)});
}

int64_t check_arguments(const ForwardArgs& args, const MoeSpec& spec,
                        const routing::RouterTraits& traits) {
  check_tensors(args, spec, traits);
  const int64_t tokens = args.hidden.shape[0];
  const int64_t counted = count_tokens(args, tokens);
  check_token_ids(args, traits, counted);
  return counted;
}

int64_t load_id(const ConstTensorView& ids, int64_t token, int64_t slot) {
  const int64_t stride = row_stride(ids);
  const int64_t index = token * stride + slot;
  if (ids.dtype == DType::kI64) return static_cast<const int64_t*>(ids.data)[index];
  return static_cast<const int32_t*>(ids.data)[index];
}

int64_t load_token_id(const ConstTensorView& token_ids, int64_t token) {
  if (token_ids.dtype == DType::kI64) return static_cast<const int64_t*>(token_ids.data)[token];
  return static_cast<const int32_t*>(token_ids.data)[token];
}

bool is_slot_id(const MoeSpec& spec, int64_t slot, int64_t id) {
  if (slot >= spec.top_k) return id == spec.num_experts + slot - spec.top_k;
  return id >= 0 && id < spec.num_experts + spec.num_zero_experts;
}

void check_ids_strict(const ConstTensorView& topk_ids, int64_t num_tokens, const MoeSpec& spec) {
  const int64_t slots = num_slots(spec);
  const auto limit = [&](int64_t slot) {
    if (slot < spec.top_k) {
      return "-1 to " + std::to_string(spec.num_experts + spec.num_zero_experts - 1);
    }
    return "-1 or " + std::to_string(spec.num_experts + slot - spec.top_k);
  };
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      const int64_t id = load_id(topk_ids, token, slot);
      if (id == -1 || is_slot_id(spec, slot, id)) continue;
      throw Error(ErrorCode::kExpertId,
                  {.what = "an expert id is out of range at token " + std::to_string(token) +
                           ", slot " + std::to_string(slot),
                   .tensor = "topk_ids",
                   .found = std::to_string(id),
                   .limit = limit(slot),
                   .hint = "IdPolicy::kSkip drops such ids"});
    }
  }
}

}  // namespace conclave::inline v0
