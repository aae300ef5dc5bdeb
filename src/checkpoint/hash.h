// XXH3-64: finds damage, does not keep out an attacker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace conclave::inline v0::checkpoint {

uint64_t hash_bytes(std::span<const std::byte> bytes) noexcept;

// Computes the same hash over pieces.
class StreamHash {
 public:
  StreamHash();
  void update(std::span<const std::byte> bytes) noexcept;
  uint64_t digest() const noexcept;

 private:
  struct State;
  struct Free {
    void operator()(State* state) const noexcept;
  };
  std::unique_ptr<State, Free> state_;
};

}  // namespace conclave::inline v0::checkpoint
