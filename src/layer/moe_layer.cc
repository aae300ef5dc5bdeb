#include "layer/engine.h"

#include "conclave/layer.h"

#include <utility>

namespace conclave::inline v0 {

struct MoeLayer::Impl {
  std::unique_ptr<Engine> engine;
};

MoeLayer MoeLayer::create(const Context& context, const MoeSpec& spec, const WeightSource& source,
                          const LayerOptions& options, const ParallelSpec& parallel) {
  auto impl = std::make_unique<Impl>();
  impl->engine = engine_row(context).make(
      {.context = context, .spec = spec, .options = options, .parallel = parallel}, source);
  return MoeLayer(std::move(impl));
}

MoeLayer::MoeLayer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;
MoeLayer& MoeLayer::operator=(MoeLayer&&) noexcept = default;
MoeLayer::~MoeLayer() = default;

void MoeLayer::forward(const ForwardArgs& args) const { impl_->engine->forward(args); }

MoeLayer MoeLayer::with_max_tokens(int64_t max_tokens) const {
  auto impl = std::make_unique<Impl>();
  impl->engine = impl_->engine->with_max_tokens(max_tokens);
  return MoeLayer(std::move(impl));
}

void MoeLayer::reload(const WeightSource& source, ReloadMode mode) {
  impl_->engine->reload(source, mode);
}

const MoeSpec& MoeLayer::spec() const noexcept { return impl_->engine->spec(); }

const ParallelSpec& MoeLayer::parallel() const noexcept { return impl_->engine->parallel(); }

const Plan& MoeLayer::plan() const noexcept { return impl_->engine->plan(); }

size_t MoeLayer::workspace_bytes() const noexcept { return impl_->engine->plan().workspace_bytes; }

size_t MoeLayer::workspace_bytes(int64_t tokens) const {
  return impl_->engine->workspace_bytes(tokens);
}

LayerStatus MoeLayer::status() const { return impl_->engine->status(); }

std::vector<TuningEntry> tuning_candidates(const Context& context, const MoeSpec& spec,
                                           const LayerOptions& options,
                                           const ParallelSpec& parallel, int64_t tokens) {
  const EngineRow& row = engine_row(context);
  if (row.candidates == nullptr) return {};
  return row.candidates(
      {.context = context, .spec = spec, .options = options, .parallel = parallel}, tokens);
}

Plan make_plan(const Context& context, const MoeSpec& spec, const LayerOptions& options,
               const ParallelSpec& parallel) {
  return engine_row(context).plan(
      {.context = context, .spec = spec, .options = options, .parallel = parallel});
}

}  // namespace conclave::inline v0
