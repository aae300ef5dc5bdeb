#include "bench/device_weights.h"

#include "conclave/error.h"

namespace conclave::tool {
namespace {

int64_t matrix_bytes(const WeightInfo& info) {
  return static_cast<int64_t>(dense_bytes(info.dtype, {info.rows, info.cols}));
}

}  // namespace

DeviceWeights::DeviceWeights(const DeviceQueue& queue, const WeightSource& source) : queue_(queue) {
  for (size_t role = 0; role < kNumWeightRoles; ++role) {
    roles_[role].info = source.describe(static_cast<WeightRole>(role));
  }
  place_gate_and_up();
  for (size_t role = 0; role < kNumWeightRoles; ++role) {
    if (roles_[role].info.count == 0) continue;
    if (roles_[role].data == nullptr) place(static_cast<WeightRole>(role));
    fill(static_cast<WeightRole>(role), source);
  }
}

void DeviceWeights::place_gate_and_up() {
  Role& gate = at(WeightRole::kGate);
  Role& up = at(WeightRole::kUp);
  if (gate.info.count == 0) return;
  const int64_t bytes = matrix_bytes(gate.info);
  tensors_.push_back(queue_.allocate(DType::kU8, {gate.info.count, 2, bytes}));
  gate.data = tensors_.back().as<std::byte>();
  up.data = gate.data + bytes;
  gate.stride_bytes = up.stride_bytes = 2 * bytes;
}

void DeviceWeights::place(WeightRole role) {
  Role& place = at(role);
  place.stride_bytes = matrix_bytes(place.info);
  tensors_.push_back(queue_.allocate(DType::kU8, {place.info.count, place.stride_bytes}));
  place.data = tensors_.back().as<std::byte>();
}

void DeviceWeights::fill(WeightRole role, const WeightSource& source) {
  const Role& place = at(role);
  const int64_t bytes = matrix_bytes(place.info);
  Tensor matrix(DType::kU8, {bytes});
  const WeightBlock whole{0, place.info.rows, 0, place.info.cols};
  for (int64_t expert = 0; expert < place.info.count; ++expert) {
    source.read(role, expert, whole, {matrix.as<std::byte>(), matrix.size_bytes()});
    queue_.upload(
        matrix.const_view(),
        {.data = place.data + expert * place.stride_bytes, .dtype = DType::kU8, .shape = {bytes}});
  }
}

ConstTensorView DeviceWeights::view(WeightRole role, int64_t expert) const {
  const Role& place = at(role);
  return {.data = place.data + expert * place.stride_bytes,
          .dtype = place.info.dtype,
          .shape = {place.info.rows, place.info.cols}};
}

void DeviceWeights::read(WeightRole role, int64_t expert, const WeightBlock&,
                         std::span<std::byte>) const {
  throw Error(ErrorCode::kDevice, {.what = "weights in device memory are not read by the host",
                                   .tensor = locate(role, expert)});
}

}  // namespace conclave::tool
