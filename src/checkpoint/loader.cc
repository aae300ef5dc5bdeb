#include "checkpoint/contents.h"
#include "checkpoint/directory_model.h"
#include "checkpoint/gguf/directory.h"
#include "checkpoint/gguf/hashed_file.h"
#include "checkpoint/gguf/model.h"
#include "checkpoint/manifest.h"
#include "checkpoint/name_list.h"
#include "checkpoint/shard_index.h"
#include "io/directory.h"

#include "conclave/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

namespace conclave::inline v0 {
namespace {

std::string render_indexes(std::span<const CheckpointLayer> layers) {
  std::vector<int64_t> indexes;
  for (const CheckpointLayer& layer : layers) indexes.push_back(layer.index);
  return checkpoint::render_ranges(indexes);
}

}  // namespace

struct Checkpoint::Impl {
  std::unique_ptr<checkpoint::Contents> contents;
};

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

Checkpoint Checkpoint::open(const std::filesystem::path& given, const CheckpointOptions& options) {
  const std::filesystem::path path = checkpoint::model_path(given);
  // The opening of a directory reports a path that is neither a file nor a directory.
  std::error_code ignored;
  const bool is_file = std::filesystem::is_regular_file(path, ignored);
  auto impl = std::make_unique<Impl>();
  impl->contents =
      is_file ? checkpoint::open_gguf(path, options) : checkpoint::open_directory(path, options);
  return Checkpoint(std::move(impl));
}

const std::filesystem::path& Checkpoint::directory() const noexcept {
  return impl_->contents->path;
}
const std::string& Checkpoint::model_type() const noexcept { return impl_->contents->model_type; }
const std::string& Checkpoint::architecture() const noexcept {
  return impl_->contents->architecture;
}
int64_t Checkpoint::num_hidden_layers() const noexcept {
  return impl_->contents->num_hidden_layers;
}
uint64_t Checkpoint::total_bytes() const noexcept { return impl_->contents->total_bytes; }
uint64_t Checkpoint::total_parameters() const noexcept { return impl_->contents->total_parameters; }
std::span<const CheckpointLayer> Checkpoint::layers() const noexcept {
  return impl_->contents->layers;
}
std::span<const std::string> Checkpoint::notes() const noexcept { return impl_->contents->notes; }

const CheckpointLayer& Checkpoint::layer(int64_t index) const {
  const auto found =
      std::find_if(impl_->contents->layers.begin(), impl_->contents->layers.end(),
                   [&](const CheckpointLayer& layer) { return layer.index == index; });
  if (found != impl_->contents->layers.end()) return *found;
  const int64_t count = impl_->contents->num_hidden_layers;
  const bool dense = index >= 0 && index < count;
  throw Error(ErrorCode::kLayerNotFound,
              {.what = dense ? fmt::format("layer {} is dense, it has no experts", index)
                             : fmt::format("the model has no layer {}", index),
               .file = impl_->contents->path.string(),
               .expected = impl_->contents->layers.empty()
                               ? "a model with MoE layers"
                               : "one of its MoE layers " + render_indexes(impl_->contents->layers),
               .found = std::to_string(index),
               .limit = fmt::format("{} layers, 0 to {}", count, count - 1)});
}

std::unique_ptr<WeightSource> Checkpoint::layer_source(int64_t index) const {
  return impl_->contents->source(static_cast<size_t>(&layer(index) - layers().data()));
}

std::vector<StoredMatrix> Checkpoint::stored_matrices(int64_t index) const {
  return impl_->contents->stored_matrices(static_cast<size_t>(&layer(index) - layers().data()));
}

std::vector<std::string> Checkpoint::layer_tensors(int64_t index) const {
  auto names = impl_->contents->tensors_of(static_cast<size_t>(&layer(index) - layers().data()));
  std::ranges::sort(names);
  const auto repeated = std::ranges::unique(names);
  names.erase(repeated.begin(), repeated.end());
  return names;
}

std::filesystem::path Checkpoint::write_manifest(const std::filesystem::path& given) {
  const std::filesystem::path path = checkpoint::model_path(given);
  std::error_code ignored;
  if (std::filesystem::is_regular_file(path, ignored)) {
    return checkpoint::write_gguf_manifest(path);
  }
  const io::Directory directory = io::Directory::open(path);
  const checkpoint::ShardSet shards = checkpoint::open_shards(directory, FileAccess::kAuto);
  checkpoint::write_manifest_file(directory, checkpoint::kManifestFile,
                                  checkpoint::ShardTensors(shards));
  return path / checkpoint::kManifestFile;
}

}  // namespace conclave::inline v0
