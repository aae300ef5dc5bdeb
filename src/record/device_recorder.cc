#include "record/device_ring.h"
#include "record/rows.h"

#include "conclave/device_routing_record.h"
#include "conclave/error.h"

#include <memory>
#include <utility>
#include <vector>

namespace conclave::inline v0 {

struct DeviceRoutingRecorder::Impl {
  RecorderOptions options;
  std::vector<std::unique_ptr<record::DeviceRing>> rings;  // by layer

  record::DeviceRing& ring(int64_t layer) const { return record::ring_of(rings, layer); }
};

DeviceRoutingRecorder::DeviceRoutingRecorder(const Context& context,
                                             std::span<const RecordedLayer> layers,
                                             RecorderOptions options)
    : impl_(new Impl{.options = std::move(options), .rings = {}}) {
  if (context.device_allocator() == nullptr) {
    throw Error(ErrorCode::kUnsupported, {.what = "this recorder is one of a device's memory",
                                          .tensor = "context",
                                          .found = std::string(context.device()),
                                          .hint = "RoutingRecorder keeps rows of the host"});
  }
  const int64_t capacity = impl_->options.capacity;
  for (const RecordedLayer& layer : record::layers_to_record(layers, capacity)) {
    impl_->rings.push_back(
        std::make_unique<record::DeviceRing>(context, layer, capacity, impl_->options.when_full));
  }
}

DeviceRoutingRecorder::DeviceRoutingRecorder(DeviceRoutingRecorder&&) noexcept = default;
DeviceRoutingRecorder& DeviceRoutingRecorder::operator=(DeviceRoutingRecorder&&) noexcept = default;
DeviceRoutingRecorder::~DeviceRoutingRecorder() = default;

void DeviceRoutingRecorder::record(int64_t layer, const DeviceRoutingRows& rows, Stream stream) {
  record::DeviceRing& ring = impl_->ring(layer);
  const ConstTensorView& ids = rows.topk_ids;
  const int64_t count = ids.shape.rank() == 2 ? ids.shape[0] : 0;
  const int64_t slots = ring.layer().num_slots;
  record::check_argument("topk_ids", ids, count, slots, {DType::kI32, DType::kI64});
  record::check_argument("topk_weights", rows.topk_weights, count, slots, {DType::kF32});
  if (!rows.tokens.empty()) {
    record::check_argument("tokens", rows.tokens, count, 2, {DType::kI64});
  }
  if (stream.handle == nullptr) {
    throw Error(ErrorCode::kNullPointer,
                {.what = "rows on a device are recorded on a stream",
                 .tensor = "stream",
                 .hint = "conclave/interop/cuda.h: to_stream, also for the default stream"});
  }
  if (count != 0) ring.record(rows, stream);
}

int64_t DeviceRoutingRecorder::recorded_tokens(int64_t layer) const {
  return impl_->ring(layer).counts().given;
}

int64_t DeviceRoutingRecorder::dropped_tokens(int64_t layer) const {
  const record::RingCounts counts = impl_->ring(layer).counts();
  return counts.given - counts.held;
}

RoutingRecord DeviceRoutingRecorder::snapshot() const {
  RoutingRecord record{
      .model = impl_->options.model, .model_type = impl_->options.model_type, .layers = {}};
  for (const auto& ring : impl_->rings) record.layers.push_back(ring->copy());
  return record;
}

void DeviceRoutingRecorder::clear() {
  for (const auto& ring : impl_->rings) ring->clear();
}

}  // namespace conclave::inline v0
