#include "conclave/refit.h"

#include "layer/moe_layer_impl.h"
#include "layer/refit/layer_refit.h"
#include "layer/refit/rank_words.h"

#include <exception>

namespace conclave::inline v0 {

struct Refit::Impl {
  LayerRefit refit;
};

// A refusal here must not keep the ranks waiting that began.
Refit::Refit(MoeLayer& layer, const RefitOptions& options) {
  try {
    impl_.reset(new Impl{LayerRefit(layer.impl_->layer.lend_to_refit(), options)});
  } catch (...) {
    if (options.refusal == RefitRefusal::kWithdraws) {
      withdraw(layer, options.communicator, reason_of(std::current_exception()));
    }
    throw;
  }
}

std::shared_ptr<const void> Refit::begin_replay(const MoeLayer& layer, Stream stream) {
  return std::make_shared<const Layer::Replay>(layer.impl_->layer.begin_replay(stream));
}

size_t Refit::kept_bytes(const MoeLayer& layer) { return layer.impl_->layer.graph_bytes(); }

size_t Refit::forget_graphs(const MoeLayer& layer) { return layer.impl_->layer.forget_graphs(); }

GraphReplay::GraphReplay(const MoeLayer& layer, Stream stream)
    : replay_(Refit::begin_replay(layer, stream)) {}

GraphReplay::~GraphReplay() = default;

size_t GraphReplay::kept_bytes(const MoeLayer& layer) { return Refit::kept_bytes(layer); }

size_t GraphReplay::forget_graphs(MoeLayer& layer) { return Refit::forget_graphs(layer); }

Refit::~Refit() = default;

void Refit::stage(const WeightSource& source) { impl_->refit.stage(source, {}); }

void Refit::stage(const WeightSource& source, const RefitScope& part) {
  impl_->refit.stage(source, part);
}

void Refit::stage_broadcast(Communicator& communicator, const WeightSource* source,
                            const BroadcastOptions& options) {
  impl_->refit.stage_broadcast(communicator, source, options);
}

void Refit::refuse_broadcast(Communicator& communicator, std::string_view reason) noexcept {
  LayerRefit::refuse_broadcast(communicator, reason);
}

void Refit::commit() { impl_->refit.commit(); }

void Refit::rollback() noexcept { impl_->refit.rollback(); }

void Refit::withdraw() noexcept { impl_->refit.withdraw({}); }

void Refit::withdraw(std::string_view reason) noexcept { impl_->refit.withdraw(reason); }

void Refit::withdraw(const MoeLayer& layer) noexcept { withdraw(layer, nullptr, {}); }

void Refit::withdraw(const MoeLayer& layer, Communicator* communicator,
                     std::string_view reason) noexcept {
  RefitRanks ranks = layer.impl_->layer.refit_ranks();
  ranks.givers = communicator;
  withdraw_from_refit(ranks, reason);
}

bool Refit::is_staged() const { return impl_->refit.is_staged(); }

uint64_t Refit::content_hash(const MoeLayer& layer) { return layer.impl_->layer.content_hash(); }

}  // namespace conclave::inline v0
