#include "layer/cuda/content_hash.h"

#include "cuda/check.h"
#include "cuda/stream.h"
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/scale_bytes.h"
#include "layer/cuda/exact_factors.h"
#include "layer/cuda/mlp_source.h"
#include "layer/cuda/pinned_memory.h"
#include "layer/cuda/weight_planes.h"
#include "layer/migration/slab_hash.h"
#include "quant/scale_type.h"
#include "quant/weight_format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <cuda_runtime_api.h>
#include <span>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

// Reads device memory piece by piece: one is hashed while the next is on its way.
class DeviceContents {
 public:
  explicit DeviceContents(const WeightFence& fence) : stream_(cuda::make_stream()) {
    for (Piece& piece : pieces_) {
      piece.memory = PinnedMemory(kPieceBytes);
      piece.arrived = cuda::make_event();
    }
    fence.follow_copies(stream_.get());
  }
  ~DeviceContents() { static_cast<void>(cudaStreamSynchronize(stream_.get())); }
  DeviceContents(const DeviceContents&) = delete;
  DeviceContents& operator=(const DeviceContents&) = delete;

  void add_number(uint64_t number) {
    flush();
    hash_.update(std::as_bytes(std::span(&number, 1)));
  }
  void add(const std::byte* data, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kPieceBytes) {
      Piece& piece = pieces_[turn_ % pieces_.size()];
      piece.bytes = std::min(kPieceBytes, bytes - at);
      cuda::check(cudaMemcpyAsync(piece.memory.data(), data + at, piece.bytes,
                                  cudaMemcpyDeviceToHost, stream_.get()),
                  "cudaMemcpyAsync");
      cuda::check(cudaEventRecord(piece.arrived.get(), stream_.get()), "cudaEventRecord");
      ++turn_;
      if (turn_ - hashed_ == pieces_.size()) hash_next();
    }
  }
  // With its length, so that neighbours cannot trade bytes.
  void add_memory(const DeviceMemory& memory) {
    add_number(memory.bytes());
    add(memory.as(), memory.bytes());
  }
  std::vector<std::byte> read(const std::byte* data, size_t bytes) {
    std::vector<std::byte> values(bytes);
    cuda::check(cudaMemcpyAsync(values.data(), data, bytes, cudaMemcpyDeviceToHost, stream_.get()),
                "cudaMemcpyAsync");
    cuda::check(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize");
    return values;
  }
  void add_values(std::span<const double> values) {
    flush();
    hash_.update(std::as_bytes(values));
  }
  uint64_t digest() {
    flush();
    return hash_.digest();
  }

 private:
  struct Piece {
    PinnedMemory memory;
    cuda::OwnedEvent arrived;
    size_t bytes = 0;
  };
  static constexpr size_t kPieceBytes = size_t{8} << 20;

  void hash_next() {
    const Piece& piece = pieces_[hashed_++ % pieces_.size()];
    cuda::check(cudaEventSynchronize(piece.arrived.get()), "cudaEventSynchronize");
    hash_.update({piece.memory.data(), piece.bytes});
  }
  void flush() {
    while (hashed_ < turn_) hash_next();
  }

  cuda::OwnedStream stream_;
  std::array<Piece, 2> pieces_;
  size_t turn_ = 0;
  size_t hashed_ = 0;
  SlabHash hash_;
};

// Scales of FactorForm::kExact lie in one of two forms, whichever took those of all experts when
// they came: the hash is of what they say.
class ScaleNumbers {
 public:
  ScaleNumbers(ScaleValues values, experts::ByteForm form) {
    const bool is_near = form == experts::ByteForm::kNear;
    for (int32_t byte = 0; byte < std::ssize(numbers_); ++byte) {
      auto& number = numbers_[static_cast<size_t>(byte)];
      if (values == ScaleValues::kPowerOfTwo) {
        number = std::ldexp(1.0, byte - (is_near ? kNearBias : kStoredBias));
        continue;
      }
      const float scale = decode_float8(static_cast<uint8_t>(byte));
      if (!(scale > 0)) continue;  // zero, and the codes of none
      const experts::ScaleBytes bytes(values, form, std::span(&scale, 1));
      numbers_[bytes.of(scale)] = scale;
    }
  }
  double of(std::byte scale) const { return numbers_[std::to_integer<size_t>(scale)]; }

 private:
  // Sums are multiplied by half of the largest scale of a matrix, whose byte is 254, or by 4 where
  // a byte is the exponent of float32.
  static constexpr int32_t kNearBias = 253;
  static constexpr int32_t kStoredBias = 129;

  static float decode_float8(uint8_t code) {
    const DType type = quant::type_of_scales(ScaleValues::kFloat8);
    return quant::format_of(type).codes->decode(code);
  }

  std::array<double, 256> numbers_ = {};
};

void add_exact_scales(const MlpSource& mlp, const experts::FactorPlanes& planes,
                      const CudaMatrixMemory& memory, int64_t place, DeviceContents& contents) {
  const ScaleNumbers numbers(mlp.problem.quant.scale_values, *memory.form);
  const auto bytes_of = static_cast<size_t>(exact_bytes(planes));
  const auto parts = static_cast<size_t>(planes.parts);
  const auto first = static_cast<size_t>(place);
  const std::vector<std::byte> bytes =
      contents.read(memory.factor_scale.as() + first * bytes_of, bytes_of);
  const std::vector<std::byte> factor_bytes =
      contents.read(memory.sum_factor.as() + first * parts * sizeof(float), parts * sizeof(float));
  std::vector<float> factors(parts);
  std::memcpy(factors.data(), factor_bytes.data(), factor_bytes.size());
  std::vector<double> values;
  for (int64_t group = 0; group < planes.groups; ++group) {
    for (int64_t part = 0; part < planes.parts; ++part) {
      for (int64_t row = 0; row < planes.rows; ++row) {
        const int64_t at = group * planes.byte_stride + experts::exact_row(row, part, planes.parts);
        values.push_back(numbers.of(bytes[static_cast<size_t>(at)]) *
                         static_cast<double>(factors[static_cast<size_t>(part)]));
      }
    }
  }
  contents.add_values(values);
}

void add_half(const MlpSource& mlp, const CudaMlpWeights& weights, MlpHalf half, int64_t place,
              DeviceContents& contents) {
  const CudaMatrixMemory& memory = weights.of(half);
  const experts::DeviceExpertMatrix& view =
      half == MlpHalf::kDown ? weights.view.down : weights.view.gate_up;
  if (memory.data.empty()) {
    // The caller's memory ends with the last row.
    const ExpertPlane matrix = matrix_plane(mlp, weights, half);
    contents.add(
        static_cast<const std::byte*>(view.data) + static_cast<size_t>(place) * matrix.bytes,
        matrix.bytes);
  }
  for (const ExpertPlane& plane : planes_of(mlp, weights, half)) {
    const bool is_exact = memory.form && (plane.data == memory.factor_scale.as() ||
                                          plane.data == memory.sum_factor.as());
    if (!is_exact) contents.add(plane.at(place), plane.bytes);
  }
  if (memory.form) add_exact_scales(mlp, view.factors, memory, place, contents);
}

// Routed experts by their numbers, then shared ones that run with them.
void add_mlp(const MlpSource& mlp, const CudaMlpWeights& weights, DeviceContents& contents) {
  std::vector<LocalExpert> experts = mlp.experts;
  std::ranges::stable_sort(
      experts, {}, [](const LocalExpert& expert) { return std::pair(expert.mlp, expert.expert); });
  for (size_t i = 0; i < experts.size(); ++i) {
    const LocalExpert& expert = experts[i];
    // A rank may have an expert twice; either place will do.
    const bool is_again = i > 0 && expert.mlp == WeightMlp::kRouted &&
                          experts[i - 1].mlp == expert.mlp &&
                          experts[i - 1].expert == expert.expert;
    if (is_again) continue;
    contents.add_number(static_cast<uint64_t>(expert.expert));
    add_half(mlp, weights, MlpHalf::kGateUp, expert.place, contents);
    add_half(mlp, weights, MlpHalf::kDown, expert.place, contents);
  }
  contents.add_memory(weights.static_scales);
}

}  // namespace

uint64_t hash_cuda_weights(const CudaPlan& plan, const CudaWeights& weights,
                           std::span<const int32_t> places, const WeightFence& fence) {
  const BesideCaptures beside;
  DeviceContents contents(fence);
  add_mlp(routed_source(plan, places), weights.routed, contents);
  if (plan.shared) add_mlp(shared_source(plan), weights.shared, contents);
  if (plan.residual) add_mlp(residual_source(plan), weights.residual, contents);
  for (const WeightId id : weights::kAll) contents.add_memory(weights.own[id].memory);
  for (const DeviceMemory& memory : weights.router_tensors) contents.add_memory(memory);
  return contents.digest();
}

}  // namespace conclave::inline v0
