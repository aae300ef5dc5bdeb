#include "support/cuda/guard_pages.h"

#include "cuda/check.h"

#include <cstdlib>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdexcept>
#include <string>

namespace conclave::testing {

namespace {

template <class Function>
Function entry_point(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned kSinceVersion = 12000;
  cuda::check(
      cudaGetDriverEntryPointByVersion(name, &entry, kSinceVersion, cudaEnableDefault, &found),
      "cudaGetDriverEntryPointByVersion");
  if (entry == nullptr) throw std::runtime_error(std::string("the driver lacks ") + name);
  return reinterpret_cast<Function>(entry);
}

// Loaded through the runtime, as in the library: nothing links libcuda.
struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity =
      entry_point<decltype(&cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity");
  decltype(&cuMemAddressReserve) reserve =
      entry_point<decltype(&cuMemAddressReserve)>("cuMemAddressReserve");
  decltype(&cuMemAddressFree) free = entry_point<decltype(&cuMemAddressFree)>("cuMemAddressFree");
  decltype(&cuMemCreate) create = entry_point<decltype(&cuMemCreate)>("cuMemCreate");
  decltype(&cuMemRelease) release = entry_point<decltype(&cuMemRelease)>("cuMemRelease");
  decltype(&cuMemMap) map = entry_point<decltype(&cuMemMap)>("cuMemMap");
  decltype(&cuMemUnmap) unmap = entry_point<decltype(&cuMemUnmap)>("cuMemUnmap");
  decltype(&cuMemSetAccess) set_access = entry_point<decltype(&cuMemSetAccess)>("cuMemSetAccess");
};

const Driver& driver() {
  static const Driver entries;
  return entries;
}

void must(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  throw std::runtime_error(std::string(call) + " failed: " + std::to_string(result));
}

CUmemAllocationProp device_memory() {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
  return properties;
}

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

void* GuardPageAllocator::allocate(size_t bytes, size_t alignment, Stream /*stream*/) {
  cuda::check(cudaFree(nullptr), "cudaFree");  // creates the context
  const CUmemAllocationProp properties = device_memory();
  Block block;
  must(driver().granularity(&block.hole, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
       "cuMemGetAllocationGranularity");
  block.mapped = round_up(bytes, block.hole);
  CUdeviceptr reserved = 0;
  must(driver().reserve(&reserved, block.mapped + 2 * block.hole, 0, 0, 0), "cuMemAddressReserve");
  block.base = reserved + block.hole;
  CUmemGenericAllocationHandle handle = 0;
  must(driver().create(&handle, block.mapped, &properties, 0), "cuMemCreate");
  block.handle = handle;
  must(driver().map(block.base, block.mapped, 0, handle, 0), "cuMemMap");
  const CUmemAccessDesc access{.location = properties.location,
                               .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  must(driver().set_access(block.base, block.mapped, &access, 1), "cuMemSetAccess");
  const size_t offset =
      side_ == GuardSide::kBegin ? 0 : (block.mapped - bytes) / alignment * alignment;
  auto* const data = reinterpret_cast<std::byte*>(block.base) + offset;
  const std::scoped_lock lock(mutex_);
  blocks_.emplace(data, block);
  return data;
}

void GuardPageAllocator::release(const Block& block) noexcept {
  static_cast<void>(driver().unmap(block.base, block.mapped));
  static_cast<void>(driver().release(block.handle));
  static_cast<void>(driver().free(block.base - block.hole, block.mapped + 2 * block.hole));
}

void GuardPageAllocator::deallocate(void* data, size_t /*bytes*/, Stream /*stream*/) noexcept {
  static_cast<void>(cudaDeviceSynchronize());
  const std::scoped_lock lock(mutex_);
  const auto found = blocks_.find(data);
  if (found == blocks_.end()) std::abort();
  release(found->second);
  blocks_.erase(found);
}

GuardPageAllocator::~GuardPageAllocator() {
  for (const auto& [data, block] : blocks_) release(block);
}

}  // namespace conclave::testing
