#include "checkpoint/gguf/hashed_file.h"

#include "io/directory.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0::checkpoint {
namespace {

io::Directory directory_of(const std::filesystem::path& path) {
  const std::filesystem::path parent = path.parent_path();
  return io::Directory::open(parent.empty() ? std::filesystem::path(".") : parent);
}

std::string manifest_of(const std::filesystem::path& path) {
  return path.filename().string() + std::string(kManifestEnding);
}

}  // namespace

GgufTensors::GgufTensors(const io::GgufFile& file) {
  for (const io::GgufFile::Part& part : file.parts()) {
    for (const io::GgufTensor& tensor : part.header.tensors) {
      places_.push_back({.part = &part, .tensor = &tensor});
    }
  }
}

int32_t GgufTensors::count() const { return static_cast<int32_t>(places_.size()); }

HashedTensor GgufTensors::at(int32_t tensor) const {
  const io::GgufTensor& stored = *places_[static_cast<size_t>(tensor)].tensor;
  return {.name = stored.name,
          .type = stored.type->name,
          .shape = stored.shape(),
          .bytes = stored.bytes};
}

std::string GgufTensors::file_of(int32_t tensor) const {
  return places_[static_cast<size_t>(tensor)].part->file.name();
}

std::span<const std::byte> GgufTensors::mapped(int32_t tensor) const {
  return io::GgufFile::mapped(places_[static_cast<size_t>(tensor)]);
}

void GgufTensors::read(int32_t tensor, uint64_t offset, std::span<std::byte> destination) const {
  io::GgufFile::read(places_[static_cast<size_t>(tensor)], offset, destination);
}

GgufVerifier::GgufVerifier(const std::filesystem::path& path, const io::GgufFile& file) {
  auto tensors = std::make_unique<GgufTensors>(file);
  int32_t number = 0;
  for (const io::GgufFile::Part& part : file.parts()) {
    for (const io::GgufTensor& tensor : part.header.tensors) numbers_.emplace(&tensor, number++);
  }
  verifier_ = std::make_unique<Verifier>(directory_of(path), manifest_of(path), std::move(tensors));
}

void GgufVerifier::check(const io::GgufTensor& tensor, uint64_t offset, uint64_t bytes) const {
  const HashBlocks blocks = hash_blocks({.name = tensor.name,
                                         .type = tensor.type->name,
                                         .shape = tensor.shape(),
                                         .bytes = tensor.bytes});
  const int32_t number = numbers_.at(&tensor);
  const uint64_t first = blocks.bytes == 0 ? 0 : offset / blocks.bytes * blocks.bytes;
  for (uint64_t at = first; at < offset + bytes; at += blocks.bytes) verifier_->check(number, at);
}

std::filesystem::path write_gguf_manifest(const std::filesystem::path& path) {
  const io::GgufFile file = io::GgufFile::open(path);
  write_manifest_file(directory_of(path), manifest_of(path), GgufTensors(file));
  return path.parent_path() / manifest_of(path);
}

}  // namespace conclave::inline v0::checkpoint
