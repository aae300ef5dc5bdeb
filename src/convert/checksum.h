// XXH3-64 over pieces: tells whether a finished shard is still what was written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace conclave::inline v0::conversion {

class Checksum {
 public:
  Checksum();
  ~Checksum();
  void update(std::span<const std::byte> bytes);
  uint64_t digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace conclave::inline v0::conversion
