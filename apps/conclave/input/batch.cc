#include "input/batch.h"

#include "choices.h"
#include "input/machine_options.h"

#include "conclave/convert.h"
#include "conclave/error.h"

#include <fmt/format.h>

#include <cstdint>
#include <utility>

namespace conclave::tool {
namespace {

ConstTensorView view_or_empty(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->view() : ConstTensorView{};
}

void require_room(int64_t num_tokens, const MoeSpec& spec) {
  const uint64_t row_bytes =
      static_cast<uint64_t>(spec.hidden_size * byte_size(natural_row_dtype(spec)));
  // There is one input row and one output row per token.
  require_memory(2 * row_bytes * static_cast<uint64_t>(num_tokens), "the hidden states",
                 "ask for fewer tokens");
}

}  // namespace

LayerInput Batch::view() const {
  return {.hidden = hidden.view(),
          .router_logits = view_or_empty(router_logits),
          .topk_ids = view_or_empty(topk_ids),
          .topk_weights = view_or_empty(topk_weights),
          .router_input = view_or_empty(router_input),
          .residual_input = view_or_empty(residual_input),
          .token_ids = view_or_empty(token_ids)};
}

BatchSource::BatchSource(BatchOptions options) : options_(std::move(options)) {
  if (!options_.input.empty()) {
    file_.emplace(options_.input, options_.record);
  } else if (options_.routing == RoutingFrom::kFile) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "there is no file to take the routing from",
                                              .tensor = "--routing",
                                              .hint = "give --input, or leave out --routing file"});
  }
}

BatchShape BatchSource::check(int64_t layer, const MoeSpec& spec) const {
  if (!file_) return {.num_tokens = options_.random_tokens, .dtype = natural_row_dtype(spec)};
  const TensorInfo& hidden = file_->find_hidden_states(layer, spec);
  return {.num_tokens = hidden.shape[0],
          .dtype = hidden.dtype,
          .gives_ids = options_.routing == RoutingFrom::kFile && !router_weighs_shared(spec) &&
                       file_->has(layer, "topk_ids")};
}

Batch BatchSource::load(int64_t layer, const MoeSpec& spec) const {
  Batch batch;
  if (!file_) {
    require_room(options_.random_tokens, spec);
    ComparedRows rows =
        random_rows(spec, options_.random_tokens, options_.seed + static_cast<uint64_t>(layer));
    batch.hidden = std::move(rows.hidden);
    batch.token_ids = std::move(rows.token_ids);
    return batch;
  }
  batch.hidden = file_->hidden_states(layer, spec);
  load_inputs(layer, spec, batch);
  if (options_.routing == RoutingFrom::kFile) load_routing(layer, spec, batch);
  return batch;
}

void BatchSource::load_inputs(int64_t layer, const MoeSpec& spec, Batch& batch) const {
  const int64_t num_tokens = batch.hidden.shape()[0];
  if (options_.routing == RoutingFrom::kGate) {
    batch.router_input = file_->router_input(layer, spec, num_tokens);
  }
  if (spec.residual.intermediate_size > 0) {
    batch.residual_input = file_->residual_input(layer, spec, num_tokens);
  }
  if (spec.router.vocab_size == 0) return;
  batch.token_ids = file_->token_ids(layer, num_tokens);
  if (!batch.token_ids) {
    file_->missing(layer, "token_ids", "this layer's router chooses experts by the token's id");
  }
}

void BatchSource::load_routing(int64_t layer, const MoeSpec& spec, Batch& batch) const {
  const int64_t num_tokens = batch.hidden.shape()[0];
  if (!router_weighs_shared(spec)) batch.topk_ids = file_->topk_ids(layer, spec, num_tokens);
  if (batch.topk_ids) {
    batch.topk_weights = file_->topk_weights(layer, spec, num_tokens);
    if (!batch.topk_weights) file_->missing(layer, "topk_weights", "topk_ids are there without");
    return;
  }
  batch.router_logits = file_->router_logits(layer, spec, num_tokens);
  if (!batch.router_logits) {
    file_->missing(layer, "topk_ids",
                   "--routing file wants topk_ids and topk_weights, or router_logits");
  }
}

std::string BatchSource::describe() const {
  std::string text =
      file_ ? fmt::format("{}", options_.input)
            : fmt::format("{} random tokens, seed {}", options_.random_tokens, options_.seed);
  text += options_.routing == RoutingFrom::kFile ? ", routed as the file says"
                                                 : ", routed by each layer's gate";
  return text;
}

}  // namespace conclave::tool
