#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/options.h"
#include "capi/sources.h"
#include "capi/structs.h"
#include "capi/values.h"

#include "conclave/error.h"
#include "conclave/lora.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0::capi {
namespace {

static_assert(CONCLAVE_RELOAD_MODE_STAGED == static_cast<int32_t>(ReloadMode::kStaged) &&
              CONCLAVE_RELOAD_MODE_IN_PLACE == static_cast<int32_t>(ReloadMode::kInPlace));

// Whether weights of the layer lie in the memory of the sources that they came from.
bool reads_sources(const MoeLayer& layer, const std::vector<KeptSource>& sources) {
  return layer.plan().in_place_bytes > 0 ||
         std::ranges::any_of(sources, [](const KeptSource& kept) {
           return kept.source->memory() == MemoryKind::kDevice;
         });
}

std::unique_ptr<conclave_layer> make_layer(const std::shared_ptr<ContextState>& context,
                                           const MoeSpec& spec, const SharedSource& source,
                                           const conclave_layer_options* options,
                                           const conclave_parallel* parallel) {
  auto kept = std::make_shared<KeptSources>(KeptSources{{{source}}});
  auto handle = std::unique_ptr<conclave_layer>(
      new conclave_layer{context, std::move(kept),
                         MoeLayer::create(*context->context, spec, *source, options_of(options),
                                          parallel_of(parallel))});
  if (!reads_sources(handle->layer, handle->kept->sources)) handle->kept->sources.clear();
  return handle;
}

// After a failure in place weights may lie in either source, otherwise in those from before.
void reload(conclave_layer& handle, const SharedSource& source, conclave_reload_mode mode) {
  const auto how = choice_of("mode", mode, ReloadMode::kInPlace);
  std::vector<KeptSource>& kept = handle.kept->sources;
  std::vector<KeptSource> next = {{source}};
  kept.reserve(kept.size() + 1);
  try {
    handle.layer.reload(*source, how);
  } catch (...) {
    if (how == ReloadMode::kInPlace && !kept.empty()) kept.push_back({source});
    throw;
  }
  if (!reads_sources(handle.layer, next)) next.clear();
  kept = std::move(next);
}

std::unique_ptr<conclave_layer> on_ranks(const conclave_layer& from,
                                         const std::shared_ptr<ContextState>& context,
                                         const conclave_parallel* parallel,
                                         const conclave_source* source) {
  auto kept = std::make_shared<KeptSources>(*from.kept);
  if (source != nullptr) kept->sources.push_back({source->source});
  auto handle = std::unique_ptr<conclave_layer>(
      new conclave_layer{context, std::move(kept),
                         from.layer.on_ranks(*context->context, parallel_of(parallel),
                                             source == nullptr ? nullptr : source->source.get())});
  if (!reads_sources(handle->layer, handle->kept->sources)) handle->kept->sources.clear();
  return handle;
}

// Throws Error(kInvalidArgument).
size_t workspace_bytes_of(const MoeLayer& layer, int64_t tokens) {
  constexpr int64_t kAny = -1;
  if (tokens == kAny) return layer.workspace_bytes();
  if (tokens >= 0) return layer.workspace_bytes(tokens);
  throw Error(ErrorCode::kInvalidArgument, {.what = "there are no calls of so many tokens",
                                            .tensor = "tokens",
                                            .found = std::to_string(tokens),
                                            .limit = "at least 0, or -1 for any number"});
}

conclave_layer_stats stats_of(const MoeLayer& layer) {
  const LayerStatus status = layer.status();
  const Plan& plan = layer.plan();
  const std::vector<AdapterInfo> adapters = layer.adapters();
  size_t adapter_bytes = 0;
  for (const AdapterInfo& adapter : adapters) adapter_bytes += adapter.bytes;
  return {.struct_size = 0,
          .forwards = status.forwards,
          .tokens = status.tokens,
          .skipped_ids = status.skipped_ids,
          .tokens_without_finite_logit = status.tokens_without_finite_logit,
          .max_tokens = plan.max_tokens,
          .num_local_experts = plan.num_local_experts,
          .workspace_bytes = layer.workspace_bytes(),
          .packed_bytes = plan.packed_bytes,
          .in_place_bytes = plan.in_place_bytes,
          .placement_epoch = layer.placement_epoch(),
          .num_adapters = std::ssize(adapters),
          .adapter_bytes = adapter_bytes,
          .refit_epoch = status.refit_epoch,
          .gate_rows_with_nan = status.gate_rows_with_nan};
}

}  // namespace
}  // namespace conclave::inline v0::capi

namespace capi = conclave::capi;

conclave_status conclave_layer_create(const conclave_context* context, const conclave_spec* spec,
                                      const conclave_source* source,
                                      const conclave_layer_options* options,
                                      const conclave_parallel* parallel,
                                      conclave_layer** out) noexcept {
  return capi::guarded([&] {
    const auto& state = capi::required(context, "context").state;
    const conclave::MoeSpec& of = capi::required(spec, "spec").spec;
    const auto& weights = capi::required(source, "source").source;
    capi::required(out, "out");
    *out = capi::make_layer(state, of, weights, options, parallel).release();
  });
}

conclave_status conclave_layer_create_from_checkpoint(const conclave_context* context,
                                                      const conclave_checkpoint* checkpoint,
                                                      int64_t index,
                                                      const conclave_layer_options* options,
                                                      const conclave_parallel* parallel,
                                                      conclave_layer** out) noexcept {
  return capi::guarded([&] {
    const auto& state = capi::required(context, "context").state;
    const auto& from = capi::required(checkpoint, "checkpoint").checkpoint;
    capi::required(out, "out");
    const conclave::MoeSpec& spec = from->layer(index).spec;
    *out = capi::make_layer(state, spec, capi::source_of(from, index), options, parallel).release();
  });
}

conclave_status conclave_layer_with_max_tokens(const conclave_layer* layer, int64_t max_tokens,
                                               conclave_layer** out) noexcept {
  return capi::guarded([&] {
    const conclave_layer& from = capi::required(layer, "layer");
    capi::required(out, "out");
    capi::hand_out(out, from.context, from.kept, from.layer.with_max_tokens(max_tokens));
  });
}

conclave_status conclave_layer_on_ranks(const conclave_layer* layer,
                                        const conclave_context* context,
                                        const conclave_parallel* parallel,
                                        const conclave_source* source,
                                        conclave_layer** out) noexcept {
  return capi::guarded([&] {
    const conclave_layer& from = capi::required(layer, "layer");
    const auto& state = capi::required(context, "context").state;
    capi::required(out, "out");
    *out = capi::on_ranks(from, state, parallel, source).release();
  });
}

void conclave_layer_destroy(conclave_layer* layer) noexcept { delete layer; }

conclave_status conclave_layer_workspace_bytes(const conclave_layer* layer, int64_t tokens,
                                               size_t* bytes) noexcept {
  return capi::guarded([&] {
    const conclave::MoeLayer& of = capi::required(layer, "layer").layer;
    size_t& to = capi::required(bytes, "bytes");
    to = capi::workspace_bytes_of(of, tokens);
  });
}

conclave_status conclave_layer_reload(conclave_layer* layer, const conclave_source* source,
                                      conclave_reload_mode mode) noexcept {
  return capi::guarded([&] {
    conclave_layer& to = capi::required(layer, "layer");
    capi::reload(to, capi::required(source, "source").source, mode);
  });
}

conclave_status conclave_layer_reload_from_checkpoint(conclave_layer* layer,
                                                      const conclave_checkpoint* checkpoint,
                                                      int64_t index,
                                                      conclave_reload_mode mode) noexcept {
  return capi::guarded([&] {
    conclave_layer& to = capi::required(layer, "layer");
    const auto& from = capi::required(checkpoint, "checkpoint").checkpoint;
    capi::reload(to, capi::source_of(from, index), mode);
  });
}

conclave_status conclave_layer_get_stats(const conclave_layer* layer,
                                         conclave_layer_stats* stats) noexcept {
  return capi::guarded([&] {
    const conclave::MoeLayer& of = capi::required(layer, "layer").layer;
    capi::fill(capi::fillable(stats, "stats"), capi::stats_of(of));
  });
}

conclave_status conclave_layer_spec(const conclave_layer* layer, conclave_spec** out) noexcept {
  return capi::guarded([&] {
    const conclave::MoeLayer& of = capi::required(layer, "layer").layer;
    capi::required(out, "out");
    capi::hand_out(out, of.spec());
  });
}
