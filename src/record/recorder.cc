#include "core/row_stride.h"
#include "record/rows.h"

#include "conclave/error.h"
#include "conclave/routing_record.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

int64_t id_at(const ConstTensorView& ids, int64_t row, int64_t slot) {
  const int64_t index = row * row_stride(ids) + slot;
  if (ids.dtype == DType::kI64) return static_cast<const int64_t*>(ids.data)[index];
  return static_cast<const int32_t*>(ids.data)[index];
}

void check_ids(const RecordedLayer& layer, const ConstTensorView& ids) {
  for (int64_t row = 0; row < ids.shape[0]; ++row) {
    for (int64_t slot = 0; slot < layer.num_slots; ++slot) {
      const int64_t id = id_at(ids, row, slot);
      if (id >= -1 && id < layer.num_ids) continue;
      throw Error(
          ErrorCode::kExpertId,
          {.what = "an id to record is out of range in layer " + std::to_string(layer.layer) +
                   ", at token " + std::to_string(row) + ", slot " + std::to_string(slot),
           .tensor = "topk_ids",
           .found = std::to_string(id),
           .limit = "-1 to " + std::to_string(layer.num_ids - 1)});
    }
  }
}

// The rows of one layer; its first `held` rows from `oldest` on are in use.
class Ring {
 public:
  Ring(const RecordedLayer& layer, int64_t capacity)
      : layer_(layer),
        capacity_(capacity),
        tokens_(static_cast<size_t>(capacity)),
        ids_(static_cast<size_t>(capacity * layer.num_slots)),
        weights_(ids_.size()) {}

  const RecordedLayer& layer() const { return layer_; }

  void add(const ConstTensorView& ids, const ConstTensorView& weights,
           std::span<const TokenKey> tokens, WhenFull when_full) {
    const std::lock_guard lock(mutex_);
    const int64_t count = ids.shape[0];
    const int64_t room = capacity_ - held_;
    if (when_full == WhenFull::kError && count > room) refuse(count, room);
    const bool keeps = when_full == WhenFull::kDropNewest;
    const int64_t taken = std::min(count, keeps ? room : capacity_);
    const int64_t first = keeps ? 0 : count - taken;
    for (int64_t row = first; row < first + taken; ++row) {
      put(ids, weights, row,
          tokens.empty() ? TokenKey{.position = given_ + row} : tokens[static_cast<size_t>(row)]);
    }
    given_ += count;
  }

  RecordedRows copy() const {
    const std::lock_guard lock(mutex_);
    RecordedRows rows;
    rows.layer = layer_;
    rows.dropped_tokens = given_ - held_;
    for (int64_t i = 0; i < held_; ++i) {
      const int64_t at = (oldest_ + i) % capacity_;
      const auto begin = static_cast<std::ptrdiff_t>(at * layer_.num_slots);
      rows.tokens.push_back(tokens_[static_cast<size_t>(at)]);
      rows.topk_ids.insert(rows.topk_ids.end(), ids_.begin() + begin,
                           ids_.begin() + begin + layer_.num_slots);
      rows.topk_weights.insert(rows.topk_weights.end(), weights_.begin() + begin,
                               weights_.begin() + begin + layer_.num_slots);
    }
    return rows;
  }

  std::pair<int64_t, int64_t> given_and_dropped() const {
    const std::lock_guard lock(mutex_);
    return {given_, given_ - held_};
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    held_ = given_ = oldest_ = 0;
  }

 private:
  [[noreturn]] void refuse(int64_t count, int64_t room) const {
    throw Error(
        ErrorCode::kState,
        {.what = "the recorder of layer " + std::to_string(layer_.layer) + " is full",
         .found = std::to_string(count) + " tokens more",
         .limit = std::to_string(room) + " of " + std::to_string(capacity_) + " tokens are free",
         .hint = "write and clear it, or give it a larger capacity"});
  }

  void put(const ConstTensorView& ids, const ConstTensorView& weights, int64_t row,
           const TokenKey& token) {
    const int64_t at = (oldest_ + held_) % capacity_;
    if (held_ < capacity_) {
      ++held_;
    } else {
      oldest_ = (oldest_ + 1) % capacity_;
    }
    const int64_t slots = layer_.num_slots;
    tokens_[static_cast<size_t>(at)] = token;
    for (int64_t slot = 0; slot < slots; ++slot) {
      ids_[static_cast<size_t>(at * slots + slot)] = static_cast<int32_t>(id_at(ids, row, slot));
    }
    std::copy_n(static_cast<const float*>(weights.data) + row * row_stride(weights), slots,
                weights_.begin() + at * slots);
  }

  const RecordedLayer layer_;
  const int64_t capacity_;
  mutable std::mutex mutex_;
  std::vector<TokenKey> tokens_;
  std::vector<int32_t> ids_;
  std::vector<float> weights_;
  int64_t oldest_ = 0;
  int64_t held_ = 0;
  int64_t given_ = 0;
};

}  // namespace

struct RoutingRecorder::Impl {
  RecorderOptions options;
  std::vector<std::unique_ptr<Ring>> rings;  // by layer

  Ring& ring(int64_t layer) const { return record::ring_of(rings, layer); }
};

RoutingRecorder::RoutingRecorder(std::span<const RecordedLayer> layers, RecorderOptions options)
    : impl_(new Impl{.options = std::move(options), .rings = {}}) {
  const int64_t capacity = impl_->options.capacity;
  for (const RecordedLayer& layer : record::layers_to_record(layers, capacity)) {
    try {
      impl_->rings.push_back(std::make_unique<Ring>(layer, capacity));
    } catch (const std::exception&) {  // bad_alloc, or a length beyond any vector
      throw Error(ErrorCode::kOutOfMemory,
                  {.what = "no memory for a ring of " + std::to_string(capacity) +
                           " tokens of layer " + std::to_string(layer.layer),
                   .tensor = "capacity"});
    }
  }
}

RoutingRecorder::RoutingRecorder(RoutingRecorder&&) noexcept = default;
RoutingRecorder& RoutingRecorder::operator=(RoutingRecorder&&) noexcept = default;
RoutingRecorder::~RoutingRecorder() = default;

void RoutingRecorder::record(int64_t layer, const ConstTensorView& topk_ids,
                             const ConstTensorView& topk_weights,
                             std::span<const TokenKey> tokens) {
  Ring& ring = impl_->ring(layer);
  const int64_t slots = ring.layer().num_slots;
  const int64_t rows = topk_ids.shape.rank() == 2 ? topk_ids.shape[0] : 0;
  record::check_argument("topk_ids", topk_ids, rows, slots, {DType::kI32, DType::kI64});
  record::check_argument("topk_weights", topk_weights, rows, slots, {DType::kF32});
  if (!tokens.empty() && static_cast<int64_t>(tokens.size()) != rows) {
    throw Error(ErrorCode::kShape, {.what = "every row has a token",
                                    .tensor = "tokens",
                                    .expected = std::to_string(rows),
                                    .found = std::to_string(tokens.size())});
  }
  check_ids(ring.layer(), topk_ids);
  ring.add(topk_ids, topk_weights, tokens, impl_->options.when_full);
}

int64_t RoutingRecorder::recorded_tokens(int64_t layer) const {
  return impl_->ring(layer).given_and_dropped().first;
}

int64_t RoutingRecorder::dropped_tokens(int64_t layer) const {
  return impl_->ring(layer).given_and_dropped().second;
}

RoutingRecord RoutingRecorder::snapshot() const {
  RoutingRecord record{
      .model = impl_->options.model, .model_type = impl_->options.model_type, .layers = {}};
  for (const auto& ring : impl_->rings) record.layers.push_back(ring->copy());
  return record;
}

void RoutingRecorder::clear() {
  for (const auto& ring : impl_->rings) ring->clear();
}

}  // namespace conclave::inline v0
