#include "checkpoint/directory_feed.h"
#include "checkpoint/feed_contents.h"
#include "checkpoint/gguf/tensor_feed.h"

#include "conclave/checkpoint.h"

#include <utility>

namespace conclave::inline v0 {

struct CheckpointFeed::Impl {
  std::unique_ptr<checkpoint::FeedContents> contents;
};

CheckpointFeed::CheckpointFeed(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CheckpointFeed::CheckpointFeed(CheckpointFeed&&) noexcept = default;
CheckpointFeed& CheckpointFeed::operator=(CheckpointFeed&&) noexcept = default;
CheckpointFeed::~CheckpointFeed() = default;

CheckpointFeed CheckpointFeed::from_config(std::string_view config_json) {
  return CheckpointFeed(std::make_unique<Impl>(checkpoint::feed_of_config(config_json)));
}

CheckpointFeed CheckpointFeed::from_spec(const MoeSpec& spec, std::string_view model_type,
                                         std::span<const int64_t> layers) {
  return CheckpointFeed(std::make_unique<Impl>(checkpoint::feed_of_spec(spec, model_type, layers)));
}

CheckpointFeed CheckpointFeed::from_spec(const MoeSpec& spec, std::string_view model_type,
                                         std::span<const int64_t> layers,
                                         std::string_view quantization,
                                         std::span<const std::string> modules) {
  return CheckpointFeed(std::make_unique<Impl>(
      checkpoint::feed_of_method(spec, model_type, layers, quantization, modules)));
}

CheckpointFeed CheckpointFeed::from_gguf(std::span<const std::byte> header,
                                         std::span<const std::span<const std::byte>> other_parts) {
  return CheckpointFeed(std::make_unique<Impl>(checkpoint::feed_of_gguf(header, other_parts)));
}

bool CheckpointFeed::put(std::string_view name, const ConstTensorView& tensor, FeedMemory memory) {
  return impl_->contents->put(name, tensor, memory);
}

bool CheckpointFeed::put(std::string_view name, const GgufTensorView& tensor, FeedMemory memory) {
  return impl_->contents->put(name, tensor, memory);
}

std::span<const int64_t> CheckpointFeed::layers() const noexcept {
  return impl_->contents->layers();
}

std::vector<std::string> CheckpointFeed::missing(size_t limit) const {
  return impl_->contents->missing(limit);
}

bool CheckpointFeed::is_complete(int64_t layer) const {
  return impl_->contents->is_complete(layer);
}

CheckpointLayer CheckpointFeed::layer(int64_t index) const { return impl_->contents->layer(index); }

std::unique_ptr<WeightSource> CheckpointFeed::layer_source(int64_t index) const {
  return impl_->contents->layer_source(index);
}

void CheckpointFeed::release(int64_t layer) { impl_->contents->release(layer); }

}  // namespace conclave::inline v0
