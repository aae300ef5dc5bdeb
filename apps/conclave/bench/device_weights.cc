#include "bench/device_weights.h"

#include "conclave/error.h"

namespace conclave::tool {
namespace {

int64_t matrix_bytes(const WeightInfo& info) {
  return static_cast<int64_t>(dense_bytes(info.dtype, {info.rows, info.cols}));
}

}  // namespace

DeviceWeights::DeviceWeights(const DeviceQueue& queue, const WeightSource& source) : queue_(queue) {
  for (const WeightId id : weights::kAll) at(id).info = source.describe(id);
  place_gate_and_up();
  for (const WeightId id : weights::kAll) {
    if (at(id).info.count == 0) continue;
    if (at(id).data == nullptr) place(id);
    fill(id, source);
  }
}

void DeviceWeights::place_gate_and_up() {
  Matrices& gate = at(weights::kGate);
  Matrices& up = at(weights::kUp);
  if (gate.info.count == 0) return;
  const int64_t bytes = matrix_bytes(gate.info);
  tensors_.push_back(queue_.allocate(DType::kU8, {gate.info.count, 2, bytes}));
  gate.data = tensors_.back().as<std::byte>();
  up.data = gate.data + bytes;
  gate.stride_bytes = up.stride_bytes = 2 * bytes;
}

void DeviceWeights::place(WeightId id) {
  Matrices& place = at(id);
  place.stride_bytes = matrix_bytes(place.info);
  tensors_.push_back(queue_.allocate(DType::kU8, {place.info.count, place.stride_bytes}));
  place.data = tensors_.back().as<std::byte>();
}

void DeviceWeights::fill(WeightId id, const WeightSource& source) {
  const Matrices& place = at(id);
  const int64_t bytes = matrix_bytes(place.info);
  Tensor matrix(DType::kU8, {bytes});
  const WeightBlock whole{0, place.info.rows, 0, place.info.cols};
  for (int64_t expert = 0; expert < place.info.count; ++expert) {
    source.read(id, expert, whole, {matrix.as<std::byte>(), matrix.size_bytes()});
    queue_.upload(
        matrix.const_view(),
        {.data = place.data + expert * place.stride_bytes, .dtype = DType::kU8, .shape = {bytes}});
  }
}

ConstTensorView DeviceWeights::view(WeightId id, int64_t expert) const {
  const Matrices& place = at(id);
  return {.data = place.data + expert * place.stride_bytes,
          .dtype = place.info.dtype,
          .shape = {place.info.rows, place.info.cols}};
}

void DeviceWeights::read(WeightId id, int64_t expert, const WeightBlock&,
                         std::span<std::byte>) const {
  throw Error(ErrorCode::kDevice, {.what = "weights in device memory are not read by the host",
                                   .tensor = locate(id, expert)});
}

}  // namespace conclave::tool
