#include "convert/checksum.h"

// Inlined, as in the library, so that nothing is linked.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace conclave::inline v0::conversion {

struct Checksum::State {
  // The library requires this alignment, which the type does not carry in every version.
  alignas(64) XXH3_state_t xxh;
};

Checksum::Checksum() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->xxh); }
Checksum::~Checksum() = default;

void Checksum::update(std::span<const std::byte> bytes) {
  XXH3_64bits_update(&state_->xxh, bytes.data(), bytes.size());
}

uint64_t Checksum::digest() const { return XXH3_64bits_digest(&state_->xxh); }

}  // namespace conclave::inline v0::conversion
