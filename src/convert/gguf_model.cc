#include "convert/gguf_model.h"

#include <fmt/format.h>

namespace conclave::inline v0::conversion {

GgufModel::GgufModel(const std::filesystem::path& path)
    : SourceModel(Checkpoint::open(path)), reader_(GgufReader::open(path)) {
  std::vector<SourceTensor> tensors;
  for (const GgufTensorInfo& info : reader_.tensors()) {
    tensors.push_back({.name = info.name,
                       .type = std::string(info.type),
                       .shape = info.shape,
                       .bytes = info.bytes,
                       .index = tensors.size()});
  }
  set(std::move(tensors), {reader_.paths().begin(), reader_.paths().end()});
}

void GgufModel::read(const SourceTensor& tensor, uint64_t offset,
                     std::span<std::byte> destination) const {
  reader_.read(reader_.tensors()[tensor.index], offset, destination);
}

std::string GgufModel::shard_name(size_t index, size_t count) const {
  return gguf_shard_name(index, count);
}

std::string gguf_shard_name(size_t index, size_t count) {
  if (count == 1) return "model.gguf";
  return fmt::format("model-{:05}-of-{:05}.gguf", index + 1, count);
}

}  // namespace conclave::inline v0::conversion
