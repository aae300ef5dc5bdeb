// XXH3-64 of bytes that come in pieces: finds a damaged copy, does not keep out an attacker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace conclave::inline v0 {

class SlabHash {
 public:
  SlabHash();
  void update(std::span<const std::byte> bytes) noexcept;
  uint64_t digest() const noexcept;

 private:
  struct State;
  struct Free {
    void operator()(State* state) const noexcept;
  };
  std::unique_ptr<State, Free> state_;
};

}  // namespace conclave::inline v0
