// A build without CUDA: no context has a device, so that no ring is made.
#include "record/device_ring.h"

#include "conclave/error.h"

namespace conclave::inline v0::record {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::kUnsupported, "this build has no rings in device memory");
}

}  // namespace

DeviceRing::DeviceRing(const Context&, const RecordedLayer& layer, int64_t capacity,
                       WhenFull when_full)
    : layer_(layer), capacity_(capacity), when_full_(when_full), ordinal_(0), allocator_(nullptr) {
  refuse();
}
DeviceRing::~DeviceRing() = default;

void DeviceRing::record(const DeviceRoutingRows&, Stream) { refuse(); }
RingCounts DeviceRing::counts() const { refuse(); }
RecordedRows DeviceRing::copy() const { refuse(); }
void DeviceRing::clear() { refuse(); }

}  // namespace conclave::inline v0::record
