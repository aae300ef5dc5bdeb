// Communicators that carry operations of devices in one launch, and can add up what they carry.
#pragma once

#include "conclave/comm.h"
#include "conclave/dtype.h"
#include "conclave/error.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

struct CUstream_st;

namespace conclave::inline v0::comm {

struct WindowParams;

// A rank adds these to the rows of all ranks: float32, a block of `parts` for each rank.
struct PartsOfRanks {
  const std::byte* parts = nullptr;
  std::span<const int64_t> bytes;  // in each rank's block; every rank knows all
  std::span<const int64_t> offsets;
  std::byte* out = nullptr;  // for this rank's block
};

// A kernel that is not the communicator's makes what it stores into the peers' windows, and takes
// what comes there: by the steps of comm/nccl/window_parts.cuh and window_units.cuh.
class WindowKernel {
 public:
  virtual ~WindowKernel() = default;
  // Enqueues one kernel, which begins and finishes the operation.
  virtual void enqueue(const WindowParams& windows, CUstream_st* stream) const = 0;
};
struct WindowMessages {
  std::span<const int64_t> send_bytes;  // for each rank, 0 for this one, at most window_bytes()
  std::span<const int64_t> recv_bytes;
  DType dtype = DType::kF32;  // ranks that send another one disagree
};

// A communicator that may do so is one of these too.
class OneLaunch {
 public:
  virtual ~OneLaunch() = default;
  // Yes, or why its operations take several launches. The same on every rank.
  virtual const Support& has_one_launch() const noexcept = 0;
  // Collective, as Communicator::begin with a stream, where has_one_launch(): out = all ranks'
  // parts of this rank's block, added in rank order.
  virtual CommHandle begin_sum_of_parts(const PartsOfRanks& parts, Stream stream) = 0;
  // The most bytes of a message of a WindowKernel, the same on every rank.
  virtual int64_t window_bytes() const noexcept = 0;
  // Collective, as begin_sum_of_parts: `kernel` moves the messages. It may run on `stream` itself,
  // before what is enqueued there behind it.
  virtual CommHandle begin_kernel(const WindowMessages& messages, const WindowKernel& kernel,
                                  Stream stream) = 0;
};

// Null for one that does not.
inline OneLaunch* find_one_launch(Communicator* communicator) {
  auto* const able = dynamic_cast<OneLaunch*>(communicator);
  return able == nullptr || !able->has_one_launch() ? nullptr : able;
}

// Whether each operation of a device takes one launch, or why it does not.
inline Support one_launch_support(const Communicator& communicator) {
  const auto* const able = dynamic_cast<const OneLaunch*>(&communicator);
  if (able != nullptr) return able->has_one_launch();
  return Support::no(std::string(communicator.name()) + " begins each operation on its own");
}

}  // namespace conclave::inline v0::comm
