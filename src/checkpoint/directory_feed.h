// Tensors of a model directory, pushed one by one.
#pragma once

#include "checkpoint/feed_contents.h"

#include "conclave/spec.h"

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0::checkpoint {

// All throw as the function of CheckpointFeed that they are for.
std::unique_ptr<FeedContents> feed_of_config(std::string_view config_json);
std::unique_ptr<FeedContents> feed_of_spec(const MoeSpec& spec, std::string_view model_type,
                                           std::span<const int64_t> layers);
std::unique_ptr<FeedContents> feed_of_method(const MoeSpec& spec, std::string_view model_type,
                                             std::span<const int64_t> layers,
                                             std::string_view quantization,
                                             std::span<const std::string> modules);

}  // namespace conclave::inline v0::checkpoint
