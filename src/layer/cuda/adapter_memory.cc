#include "layer/cuda/adapter_memory.h"

#include "cuda/check.h"
#include "cuda/device_wait.h"
#include "cuda/stream.h"
#include "experts/cuda/adapters/pack.h"
#include "layer/adapters/adapter_parts.h"
#include "layer/cuda/adapter_order.h"

#include "conclave/interop/cuda.h"

#include <algorithm>
#include <cstring>
#include <cuda_runtime_api.h>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

using experts::DeviceExpertFactors;
using experts::ExpertAdapter;

// Routed experts by local number: those of places, then slices of the shared experts that run as
// further ones.
AdapterPart routed_part(const CudaPlan& plan, const LoraAdapter& adapter,
                        std::span<const int32_t> places) {
  AdapterPart routed = routed_adapter_part(plan, adapter, places);
  const AdapterPart shared = shared_adapter_part(plan, adapter, plan.fused.slots() > 0);
  const int64_t width = plan.routed.problem.intermediate_size;
  for (const ExpertAdapter& expert : shared.experts) {
    for (int32_t slice = 0; slice < plan.fused.slices; ++slice) {
      const TensorSlice columns{.begin = slice * width, .end = (slice + 1) * width};
      routed.experts.push_back(slice_of_adapter(expert, columns));
    }
  }
  return routed;
}

// Factors have another type on this device where kernels read another.
AdapterPart on_device(AdapterPart part) {
  part.shape.dtype = experts::device_factor_dtype(part.shape.dtype);
  return part;
}

size_t table_bytes(const AdapterPart& part) {
  return part.experts.size() * sizeof(DeviceExpertFactors);
}

size_t factor_bytes(const AdapterPart& part) {
  size_t bytes = 0;
  for (const ExpertAdapter& expert : part.experts) {
    bytes += experts::device_adapter_bytes(expert, part.shape);
  }
  return bytes;
}

// Lays out parts in host memory as they will lie on the device.
class Layout {
 public:
  Layout(std::byte* to, const std::byte* place) : to_(to), place_(place) {}

  // The table of the part's experts, then their factors.
  const DeviceExpertFactors* add(const AdapterPart& part) {
    const std::byte* const table = place_;
    std::byte* entry = to_;
    skip(table_bytes(part));
    for (const ExpertAdapter& expert : part.experts) {
      const DeviceExpertFactors packed =
          experts::pack_device_adapter(expert, part.shape, to_, place_);
      skip(experts::device_adapter_bytes(expert, part.shape));
      std::memcpy(entry, &packed, sizeof(packed));
      entry += sizeof(packed);
      most_terms_ = std::max({most_terms_, packed.gate_up.terms, packed.down.terms});
    }
    return reinterpret_cast<const DeviceExpertFactors*>(table);
  }
  int32_t most_terms() const { return most_terms_; }

 private:
  void skip(size_t bytes) {
    to_ += bytes;
    place_ += bytes;
  }

  std::byte* to_;
  const std::byte* place_;
  int32_t most_terms_ = 0;
};
static_assert(sizeof(DeviceExpertFactors) % 16 == 0, "factors behind a table are aligned");

// The part in the order of the weights' columns.
OrderedPart in_order(AdapterPart part, const CudaMlpPlan& mlp, const CudaMlpWeights& weights,
                     cudaStream_t stream) {
  const DeviceMemory& held = weights.inner_columns;
  if (held.empty()) return {.part = std::move(part), .memory = {}};
  std::vector<int32_t> columns(held.bytes() / sizeof(int32_t));
  cuda::check(
      cudaMemcpyAsync(columns.data(), held.as(), held.bytes(), cudaMemcpyDeviceToHost, stream),
      "cudaMemcpyAsync");
  cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return order_factors(part, columns, mlp.problem.intermediate_size);
}

void copy_to_device(const std::vector<std::byte>& from, const AdapterMemory& to,
                    cudaStream_t stream) {
  cuda::check(cudaMemcpyAsync(to.data(), from.data(), from.size(), cudaMemcpyHostToDevice, stream),
              "cudaMemcpyAsync");
  cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

}  // namespace

AdapterMemory::AdapterMemory(DeviceAllocator& allocator, int32_t ordinal, size_t bytes,
                             Stream stream)
    : ordinal_(ordinal), memory_(allocator, bytes, stream, "adapters") {}

AdapterMemory::~AdapterMemory() {
  if (memory_.empty() || cuda::has_ended(ordinal_)) return;
  // Forwards may still read it, and nobody will say when they have: it belongs to the process then.
  memory_.keep();
}

std::unique_ptr<CudaAdapter> upload_adapter(const Context& context, const CudaPlan& plan,
                                            const CudaWeights& weights, const LoraAdapter& adapter,
                                            std::span<const int32_t> experts) {
  const cuda::DeviceGuard guard(plan.device.ordinal);
  const cuda::OwnedStream stream = cuda::make_stream();
  const OrderedPart routed = in_order(on_device(routed_part(plan, adapter, experts)), plan.routed,
                                      weights.routed, stream.get());
  OrderedPart shared{.part = on_device(shared_adapter_part(plan, adapter, plan.shared.has_value())),
                     .memory = {}};
  if (plan.shared) {
    shared = in_order(std::move(shared.part), *plan.shared, weights.shared, stream.get());
  }
  std::vector<std::byte> bytes(table_bytes(routed.part) + factor_bytes(routed.part) +
                               table_bytes(shared.part) + factor_bytes(shared.part));
  auto packed = std::make_unique<CudaAdapter>(AdapterMemory(
      *context.device_allocator(), plan.device.ordinal, bytes.size(), to_stream(stream.get())));
  if (bytes.empty()) return packed;
  Layout layout(bytes.data(), packed->memory.data());
  packed->routed = layout.add(routed.part);
  packed->shared = shared.part.experts.empty() ? nullptr : layout.add(shared.part);
  packed->most_terms = layout.most_terms();
  copy_to_device(bytes, packed->memory, stream.get());
  return packed;
}

std::shared_ptr<const CudaAdapterTable> upload_adapter_table(
    const Context& context, const CudaPlan& plan, std::span<const HeldAdapter> adapters) {
  // Pointers of routed experts, of shared ones, then ids.
  const size_t pointers = adapters.size() * sizeof(const void*);
  std::vector<std::byte> bytes(2 * pointers + adapters.size() * sizeof(int32_t));
  const cuda::DeviceGuard guard(plan.device.ordinal);
  const cuda::OwnedStream stream = cuda::make_stream();
  auto table = std::make_shared<CudaAdapterTable>(AdapterMemory(
      *context.device_allocator(), plan.device.ordinal, bytes.size(), to_stream(stream.get())));
  if (adapters.empty()) return table;
  std::byte* to = bytes.data();
  for (const HeldAdapter& held : adapters) {
    const auto& packed = static_cast<const CudaAdapter&>(*held.packed);
    std::memcpy(to, &packed.routed, sizeof(packed.routed));
    std::memcpy(to + pointers, &packed.shared, sizeof(packed.shared));
    std::memcpy(bytes.data() + 2 * pointers + (to - bytes.data()) / 2, &held.info.id,
                sizeof(held.info.id));
    to += sizeof(packed.routed);
    table->most_terms = std::max(table->most_terms, packed.most_terms);
  }
  static_assert(sizeof(const void*) == 2 * sizeof(int32_t));
  const std::byte* const place = table->memory.data();
  table->routed = reinterpret_cast<const DeviceExpertFactors* const*>(place);
  table->shared = reinterpret_cast<const DeviceExpertFactors* const*>(place + pointers);
  table->ids = reinterpret_cast<const int32_t*>(place + 2 * pointers);
  table->count = static_cast<int32_t>(adapters.size());
  copy_to_device(bytes, table->memory, stream.get());
  return table;
}

}  // namespace conclave::inline v0
