// The manifest of a GGUF file, which lies beside it, and the check of its tensors against it.
#pragma once

#include "checkpoint/manifest.h"
#include "io/gguf/file.h"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <unordered_map>
#include <vector>

namespace conclave::inline v0::checkpoint {

// The tensors of all parts, in file order.
class GgufTensors final : public HashedTensors {
 public:
  // `file` must outlive it.
  explicit GgufTensors(const io::GgufFile& file);
  int32_t count() const override;
  HashedTensor at(int32_t tensor) const override;
  std::string file_of(int32_t tensor) const override;
  std::span<const std::byte> mapped(int32_t tensor) const override;
  void read(int32_t tensor, uint64_t offset, std::span<std::byte> destination) const override;

 private:
  std::vector<io::GgufFile::Place> places_;
};

class GgufVerifier {
 public:
  // Throws as Verifier. `file`, opened from this path, must outlive it.
  GgufVerifier(const std::filesystem::path& path, const io::GgufFile& file);
  // Throws Error(kChecksum) if a byte of [offset, offset + bytes) of the tensor, or of the slices
  // that it lies in, differs from what was hashed.
  void check(const io::GgufTensor& tensor, uint64_t offset, uint64_t bytes) const;

 private:
  std::unordered_map<const io::GgufTensor*, int32_t> numbers_;
  std::unique_ptr<const Verifier> verifier_;
};

// Throws as Checkpoint::write_manifest.
std::filesystem::path write_gguf_manifest(const std::filesystem::path& path);

}  // namespace conclave::inline v0::checkpoint
