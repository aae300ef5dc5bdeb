// Tensors of a GGUF model, pushed one by one.
#pragma once

#include "checkpoint/feed_contents.h"

#include <cstddef>
#include <memory>
#include <span>

namespace conclave::inline v0::checkpoint {

// Throws as CheckpointFeed::from_gguf.
std::unique_ptr<FeedContents> feed_of_gguf(std::span<const std::byte> header,
                                           std::span<const std::span<const std::byte>> other_parts);

}  // namespace conclave::inline v0::checkpoint
