#include "layer/migration/slab_hash.h"

// Inlined, so that an installed package does not depend on the library.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace conclave::inline v0 {

struct SlabHash::State {
  // The library requires this alignment, which the type does not carry in every version.
  alignas(64) XXH3_state_t xxh;
};

SlabHash::SlabHash() : state_(new State) { XXH3_64bits_reset(&state_->xxh); }

void SlabHash::update(std::span<const std::byte> bytes) noexcept {
  XXH3_64bits_update(&state_->xxh, bytes.data(), bytes.size());
}

uint64_t SlabHash::digest() const noexcept { return XXH3_64bits_digest(&state_->xxh); }

void SlabHash::Free::operator()(State* state) const noexcept { delete state; }

}  // namespace conclave::inline v0
