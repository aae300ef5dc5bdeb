#include "layer/engine.h"

#include "conclave/error.h"

namespace conclave::inline v0 {

// For engines that keep no second copy of what they have: the source is read as by create.
std::unique_ptr<Engine> Engine::on_ranks(const Context& context, const ParallelSpec& parallel,
                                         const WeightSource* source) const {
  if (source == nullptr) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "a layer on this device takes its weights to other ranks from a source",
                 .tensor = "source",
                 .found = "null"});
  }
  return engine_row(context).make(
      {.context = context, .spec = plan().spec, .options = plan().options, .parallel = parallel},
      *source);
}

std::unique_ptr<EngineAdapter> Engine::pack_adapter(const LoraAdapter&, const LayerWeights&,
                                                    std::span<const int32_t>) const {
  throw Error(ErrorCode::kUnsupported,
              {.what = "this device takes no adapters", .hint = takes_adapters().reason()});
}

std::shared_ptr<const EngineAdapterTable> Engine::adapter_table(
    std::span<const HeldAdapter>) const {
  return nullptr;
}

std::unique_ptr<EngineRefit> Engine::begin_refit(LayerWeights&, const RefitRequest&) const {
  throw Error(ErrorCode::kUnsupported,
              {.what = "this device takes no refit", .hint = refits().reason()});
}

uint64_t Engine::content_hash(const LayerWeights&, std::span<const int32_t>) const {
  throw Error(ErrorCode::kUnsupported,
              {.what = "weights on this device have no hash", .hint = refits().reason()});
}

int64_t Engine::first_missing(const Engine&, const LayerWeights&) const { return -1; }

std::unique_ptr<LayerWeights> Engine::take_over(const Engine&, const LayerWeights&,
                                                const WeightSource* source) const {
  return load(*source, nullptr);
}

}  // namespace conclave::inline v0
