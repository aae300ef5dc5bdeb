// Communicators that carry operations of devices in one launch, and can add up what they carry.
#pragma once

#include "conclave/comm.h"
#include "conclave/error.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace conclave::inline v0::comm {

// A rank adds these to the rows of all ranks: float32, a block of `parts` for each rank.
struct PartsOfRanks {
  const std::byte* parts = nullptr;
  std::span<const int64_t> bytes;  // in each rank's block; every rank knows all
  std::span<const int64_t> offsets;
  std::byte* out = nullptr;  // for this rank's block
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
