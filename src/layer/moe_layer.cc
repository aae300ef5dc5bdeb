#include "layer/engine.h"
#include "layer/layer.h"
#include "layer/moe_layer_impl.h"

#include "conclave/layer.h"
#include "conclave/lora.h"

#include <exception>
#include <utility>

namespace conclave::inline v0 {

MoeLayer MoeLayer::create(const Context& context, const MoeSpec& spec, const WeightSource& source,
                          const LayerOptions& options, const ParallelSpec& parallel) {
  const EngineRequest request{
      .context = context, .spec = spec, .options = options, .parallel = parallel};
  return MoeLayer(std::unique_ptr<Impl>(new Impl{Layer(request, source)}));
}

MoeLayer::MoeLayer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;
MoeLayer& MoeLayer::operator=(MoeLayer&&) noexcept = default;
MoeLayer::~MoeLayer() = default;

void MoeLayer::forward(const ForwardArgs& args) const { impl_->layer.forward(args); }

MoeLayer MoeLayer::with_max_tokens(int64_t max_tokens) const {
  return MoeLayer(std::unique_ptr<Impl>(new Impl{Layer(impl_->layer, max_tokens)}));
}

MoeLayer MoeLayer::on_ranks(const Context& context, const ParallelSpec& parallel,
                            const WeightSource* source) const {
  return MoeLayer(std::unique_ptr<Impl>(new Impl{Layer(impl_->layer, context, parallel, source)}));
}

void MoeLayer::reload(const WeightSource& source, ReloadMode mode) {
  impl_->layer.reload(source, mode);
}

void MoeLayer::update_placement(const ExpertSlots& slots, const MigrationOptions& options) {
  impl_->layer.update_placement(slots, options);
}

void MoeLayer::update_placement(const ParallelSpec& next, const MigrationOptions& options) {
  ExpertSlots slots;
  std::exception_ptr refusal;
  try {
    slots = impl_->layer.slots_of_split(next);
  } catch (const Error&) {
    refusal = std::current_exception();
  }
  impl_->layer.update_placement(slots, options, refusal);
}

int32_t MoeLayer::add_adapter(const LoraAdapter& adapter) {
  return impl_->layer.add_adapter(adapter);
}

void MoeLayer::remove_adapter(int32_t id) { impl_->layer.remove_adapter(id); }

std::vector<AdapterInfo> MoeLayer::adapters() const {
  std::vector<AdapterInfo> infos;
  for (const HeldAdapter& held : impl_->layer.adapters()->adapters) infos.push_back(held.info);
  return infos;
}

ExpertSlots MoeLayer::slots() const { return slots_of(impl_->layer.epoch()->places); }

uint64_t MoeLayer::placement_epoch() const { return impl_->layer.epoch()->number; }

const MoeSpec& MoeLayer::spec() const noexcept { return impl_->layer.spec(); }

const ParallelSpec& MoeLayer::parallel() const noexcept { return impl_->layer.basis().parallel; }

const Plan& MoeLayer::plan() const noexcept { return impl_->layer.plan(); }

size_t MoeLayer::workspace_bytes() const noexcept { return plan().workspace_bytes; }

size_t MoeLayer::workspace_bytes(int64_t tokens) const {
  return impl_->layer.workspace_bytes(tokens);
}

LayerStatus MoeLayer::status() const { return impl_->layer.status(); }

std::vector<TuningEntry> tuning_candidates(const Context& context, const MoeSpec& spec,
                                           const LayerOptions& options,
                                           const ParallelSpec& parallel, int64_t tokens) {
  const EngineRow& row = engine_row(context);
  if (row.candidates == nullptr) return {};
  return row.candidates(
      {.context = context, .spec = spec, .options = options, .parallel = parallel}, tokens);
}

Plan make_plan(const Context& context, const MoeSpec& spec, const LayerOptions& options,
               const ParallelSpec& parallel, const WeightSource* source) {
  return engine_row(context).plan({.context = context,
                                   .spec = spec,
                                   .options = options,
                                   .parallel = parallel,
                                   .source = source});
}

}  // namespace conclave::inline v0
