#include "checkpoint/plane_data.h"

#include "checkpoint/coded_values.h"
#include "core/weight_types.h"

#include "conclave/error.h"

#include <cstring>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

// Enough for the matrices that some tens of threads read at once.
constexpr size_t kMaxKeptBytes = size_t{256} << 20;

}  // namespace

std::shared_ptr<PlaneCache::Entry> PlaneCache::entry_of(const Key& key, size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto found = kept_.find(key);
  if (found != kept_.end()) {
    uses_.splice(uses_.begin(), uses_, found->second.use);
    return found->second.entry;
  }
  while (!uses_.empty() && kept_bytes_ + bytes > kMaxKeptBytes) {
    const auto oldest = kept_.find(uses_.back());
    kept_bytes_ -= oldest->second.bytes;
    kept_.erase(oldest);
    uses_.pop_back();
  }
  uses_.push_front(key);
  kept_bytes_ += bytes;
  Kept& added = kept_[key];
  added = {.entry = std::make_shared<Entry>(), .use = uses_.begin(), .bytes = bytes};
  return added.entry;
}

std::shared_ptr<const PlaneCache::Bytes> PlaneCache::slice(const PlaneReading& reading,
                                                           int64_t index) const {
  const auto bytes = static_cast<size_t>(packed_bytes(reading.dtype, reading.slice_elements));
  const std::shared_ptr<Entry> entry =
      entry_of({.tensor = reading.inputs.front(), .slice = index}, bytes);
  std::call_once(entry->once, [&] {
    Bytes plane(bytes);
    decode(reading, index, plane);
    *entry->bytes = std::move(plane);
  });
  return entry->bytes;
}

PlaneInput PlaneCache::read_input(int32_t tensor, const PlaneReading& reading, int64_t index,
                                  Bytes& buffer) const {
  if (tensor < 0) return {};
  const TensorInfo& info = table_.info(tensor);
  const uint64_t bytes = info.bytes / static_cast<uint64_t>(reading.slices);
  const uint64_t offset = bytes * static_cast<uint64_t>(index);
  if (verifier_ != nullptr && bytes > 0) verifier_->check(tensor, offset);
  buffer.resize(bytes);
  data_.read(tensor, offset, buffer);
  return {.info = &info, .file = table_.path_of(tensor), .bytes = buffer};
}

void PlaneCache::decode(const PlaneReading& reading, int64_t index, Bytes& plane) const {
  if (!reading.is_read) {
    const int32_t tensor = reading.inputs.front();
    throw Error(ErrorCode::kUnsupportedQuantization,
                {.what = "a matrix that a layer has as values is stored in codes",
                 .file = table_.path_of(tensor),
                 .tensor = table_.info(tensor).name,
                 .expected = "F32, F16 or BF16",
                 .found = std::string(to_string(reading.dtype)) + " codes",
                 .hint = "leave this module out when the model is quantised"});
  }
  if (reading.coded) return reading.coded->decode(table_, data_, verifier_, plane);
  std::vector<Bytes> buffers(reading.inputs.size());
  std::vector<PlaneInput> inputs;
  for (size_t i = 0; i < buffers.size(); ++i) {
    inputs.push_back(read_input(reading.inputs[i], reading, index, buffers[i]));
  }
  const auto decode = reading.as_values ? reading.row->decode_values : reading.row->decode;
  decode(reading.form, inputs, plane);
}

void SliceData::read(int32_t, uint64_t offset, std::span<std::byte> destination) const {
  std::memcpy(destination.data(), bytes_->data() + offset, destination.size());
}

}  // namespace conclave::inline v0::checkpoint
