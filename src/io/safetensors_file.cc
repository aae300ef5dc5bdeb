#include "core/checked.h"
#include "io/file.h"
#include "io/safetensors_header.h"
#include "io/safetensors_open.h"
#include "io/safetensors_rules.h"
#include "io/sniff.h"

#include "conclave/error.h"
#include "conclave/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

namespace conclave::inline v0 {

struct SafetensorsFile::Impl {
  io::File file;
  std::filesystem::path path;
  io::SafetensorsHeader header;

  static SafetensorsFile open(io::File file);
};

SafetensorsFile SafetensorsFile::Impl::open(io::File file) {
  std::array<std::byte, io::kSniffBytes> buffer;
  const auto start = std::span(buffer).first(std::min<uint64_t>(buffer.size(), file.bytes()));
  file.read(0, start);
  io::refuse_foreign_format(start, file.name());
  const uint64_t bytes = io::safetensors_header_bytes(start, file.bytes(), file.name());
  std::string json(bytes, '\0');
  file.read(io::kLengthBytes, std::as_writable_bytes(std::span(json)));
  auto impl = std::make_unique<Impl>(Impl{.file = std::move(file), .path = {}, .header = {}});
  impl->path = impl->file.name();
  impl->header = io::parse_safetensors_header(json, impl->file.bytes(), impl->file.name());
  return SafetensorsFile(std::move(impl));
}

namespace io {

SafetensorsFile open_safetensors(File file) { return SafetensorsFile::Impl::open(std::move(file)); }

}  // namespace io

SafetensorsFile::SafetensorsFile(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;
SafetensorsFile::~SafetensorsFile() = default;

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path, FileAccess access) {
  return Impl::open(io::File::open(path, {.access = access}));
}

std::vector<TensorInfo> SafetensorsFile::parse_header(
    std::span<const std::byte> bytes, uint64_t file_bytes, std::string_view file_name,
    std::map<std::string, std::string>* metadata) {
  const uint64_t header_bytes = io::safetensors_header_bytes(bytes, file_bytes, file_name);
  if (header_bytes > bytes.size() - io::kLengthBytes) {
    throw Error(ErrorCode::kSafetensorsHeaderTruncated,
                {.what = "the bytes given end within the header",
                 .file = std::string(file_name),
                 .expected = fmt::format("at least {} bytes", io::kLengthBytes + header_bytes),
                 .found = fmt::format("{} bytes", bytes.size())});
  }
  const std::string_view json(reinterpret_cast<const char*>(bytes.data()) + io::kLengthBytes,
                              header_bytes);
  io::SafetensorsHeader header = io::parse_safetensors_header(json, file_bytes, file_name);
  if (metadata != nullptr) *metadata = std::move(header.metadata);
  return std::move(header.tensors);
}

const std::filesystem::path& SafetensorsFile::path() const noexcept { return impl_->path; }

std::span<const TensorInfo> SafetensorsFile::tensors() const noexcept {
  return impl_->header.tensors;
}

const std::map<std::string, std::string>& SafetensorsFile::metadata() const noexcept {
  return impl_->header.metadata;
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const noexcept {
  const std::vector<TensorInfo>& tensors = impl_->header.tensors;
  const auto found = impl_->header.names.find(
      0, name, [&](uint32_t i) { return std::string_view(tensors[i].name); });
  return found ? &tensors[*found] : nullptr;
}

void SafetensorsFile::read(const TensorInfo& tensor, uint64_t offset,
                           std::span<std::byte> destination) const {
  const auto end = checked_add<uint64_t>(offset, destination.size());
  const auto file_offset = checked_add(tensor.file_offset, offset);
  if (!end || *end > tensor.bytes || !file_offset) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = fmt::format("a read of {} bytes at offset {} leaves the tensor",
                                     destination.size(), offset),
                 .file = impl_->file.name(),
                 .tensor = tensor.name,
                 .limit = fmt::format("{} bytes", tensor.bytes)});
  }
  impl_->file.read(*file_offset, destination);
}

std::span<const std::byte> SafetensorsFile::mapped(const TensorInfo& tensor) const noexcept {
  const std::span<const std::byte> mapping = impl_->file.mapping();
  if (tensor.file_offset > mapping.size() || tensor.bytes > mapping.size() - tensor.file_offset) {
    return {};
  }
  return mapping.subspan(tensor.file_offset, tensor.bytes);
}

void SafetensorsFile::release(const TensorInfo& tensor, uint64_t offset,
                              uint64_t bytes) const noexcept {
  impl_->file.release(tensor.file_offset + offset, bytes);
}

Tensor SafetensorsFile::load(std::string_view name) const {
  const TensorInfo* info = find(name);
  if (info == nullptr) {
    throw Error(ErrorCode::kTensorMissing, {.what = "the file holds no tensor of this name",
                                            .file = impl_->file.name(),
                                            .tensor = std::string(name)});
  }
  Tensor tensor(info->dtype, Shape(info->shape));
  read(*info, 0, std::span(tensor.as<std::byte>(), tensor.size_bytes()));
  return tensor;
}

}  // namespace conclave::inline v0
