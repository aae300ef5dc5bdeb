#include "layer/adapters/host_adapter.h"

#include "experts/adapters/pack.h"
#include "layer/adapters/adapter_parts.h"

#include <utility>

namespace conclave::inline v0 {
namespace {

size_t bytes_of(const AdapterPart& part) {
  size_t bytes = 0;
  for (const experts::ExpertAdapter& expert : part.experts) {
    bytes += experts::packed_adapter_bytes(expert, part.shape);
  }
  return bytes;
}

experts::MlpAdapter pack(const AdapterPart& part, std::byte*& to) {
  experts::MlpAdapter packed{.dtype = part.shape.dtype, .experts = {}};
  for (const experts::ExpertAdapter& expert : part.experts) {
    packed.experts.push_back(experts::pack_adapter(expert, part.shape, to));
    to += experts::packed_adapter_bytes(expert, part.shape);
  }
  return packed;
}

}  // namespace

std::unique_ptr<HostAdapter> pack_host_adapter(const Context& context, const LayerPlan& plan,
                                               const LoraAdapter& adapter,
                                               std::span<const int32_t> experts) {
  const AdapterPart routed = routed_adapter_part(plan, adapter, experts);
  const AdapterPart shared = shared_adapter_part(plan, adapter, plan.shared != nullptr);
  auto packed = std::make_unique<HostAdapter>();
  const size_t bytes = bytes_of(routed) + bytes_of(shared);
  if (bytes != 0) packed->memory = cpu::Buffer(context.host_allocator(), bytes);
  std::byte* to = packed->memory.data();
  packed->routed = pack(routed, to);
  packed->shared = pack(shared, to);
  return packed;
}

std::shared_ptr<const HostAdapterTable> host_adapter_table(std::span<const HeldAdapter> adapters) {
  auto table = std::make_shared<HostAdapterTable>();
  for (const HeldAdapter& held : adapters) {
    const auto& packed = static_cast<const HostAdapter&>(*held.packed);
    table->routed.push_back(&packed.routed);
    table->shared.push_back(&packed.shared);
  }
  return table;
}

}  // namespace conclave::inline v0
