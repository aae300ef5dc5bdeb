// Memory of the host that a device reads by itself.
#pragma once

#include "cpu/memory.h"

#include <cstddef>

namespace conclave::inline v0 {

// Whole huge pages, registered with the driver: a sixteenth of the time that it takes for as much
// memory of its own. Throws Error: kOutOfMemory; kDevice if the driver refuses.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  explicit PinnedMemory(size_t bytes);
  PinnedMemory(PinnedMemory&&) noexcept = default;
  PinnedMemory& operator=(PinnedMemory&& other) noexcept;
  ~PinnedMemory() { release(); }

  std::byte* data() const noexcept { return memory_.data(); }
  size_t size() const noexcept { return memory_.size(); }

 private:
  void release() noexcept;

  cpu::Buffer memory_;
};

}  // namespace conclave::inline v0
