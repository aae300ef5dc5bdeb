#include "checkpoint/hash.h"
#include "checkpoint/shared/shared_layout.h"
#include "checkpoint/shared/shared_mapping.h"

#include "conclave/error.h"
#include "conclave/shared_weights.h"

#include <cstring>
#include <utility>

namespace conclave::inline v0 {

using checkpoint::SharedHeader;
using checkpoint::SharedLayout;
using checkpoint::SharedMapping;
using checkpoint::SharedPlace;

struct SharedWeightsWriter::Impl {
  std::string path;
  SharedLayout layout;
  SharedMapping mapping;

  SharedHeader& header() const {
    return *static_cast<SharedHeader*>(static_cast<void*>(mapping.data()));
  }
  bool is_open() const { return header().sequence % 2 == 1; }
};

SharedWeightsWriter::SharedWeightsWriter(const std::filesystem::path& path,
                                         std::span<const SharedTensor> tensors, uint64_t layer) {
  SharedLayout layout = checkpoint::lay_out(tensors, path.string());
  SharedMapping mapping = SharedMapping::create(path, layout.file_bytes);
  impl_.reset(new Impl{path.string(), std::move(layout), std::move(mapping)});
  const std::vector<std::byte> rows = checkpoint::pack_rows(tensors);
  SharedHeader header{.num_tensors = static_cast<uint32_t>(tensors.size()),
                      .file_bytes = impl_->layout.file_bytes,
                      .layer = layer};
  std::memcpy(header.magic, checkpoint::kSharedMagic, sizeof(header.magic));
  for (const SharedTensor& tensor : tensors) header.num_experts += tensor.experts.size();
  header.hash = checkpoint::hash_of(header, rows);
  std::memcpy(impl_->mapping.data(), &header, sizeof(header));
  std::memcpy(impl_->mapping.data() + sizeof(header), rows.data(), rows.size());
  impl_->mapping.rename_to(path);
}

SharedWeightsWriter::SharedWeightsWriter(SharedWeightsWriter&&) noexcept = default;
SharedWeightsWriter& SharedWeightsWriter::operator=(SharedWeightsWriter&&) noexcept = default;
SharedWeightsWriter::~SharedWeightsWriter() = default;

void SharedWeightsWriter::begin() {
  if (impl_->is_open()) {
    throw Error(ErrorCode::kState, {.what = "a version of these shared weights is begun already",
                                    .file = impl_->path,
                                    .hint = "publish it first"});
  }
  SharedHeader& header = impl_->header();
  __atomic_store_n(&header.sequence, header.sequence + 1, __ATOMIC_RELAXED);
  // No byte that is written from now on may be seen before the mark.
  checkpoint::order_memory();
}

std::span<std::byte> SharedWeightsWriter::memory(WeightId id, int64_t expert) {
  const SharedPlace* const place = impl_->layout.find(id);
  const int64_t at = place != nullptr ? place->find(expert) : -1;
  if (at < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "this matrix was not declared for shared weights",
                 .file = impl_->path,
                 .tensor = to_string(id),
                 .found = "expert " + std::to_string(expert)});
  }
  if (!impl_->is_open()) {
    throw Error(ErrorCode::kState, {.what = "shared weights are written between begin and publish",
                                    .file = impl_->path,
                                    .tensor = to_string(id)});
  }
  return impl_->mapping.span(place->first + static_cast<uint64_t>(at) * place->stride,
                             place->matrix_bytes);
}

void SharedWeightsWriter::write(WeightId id, int64_t expert, std::span<const std::byte> bytes) {
  const std::span<std::byte> to = memory(id, expert);
  if (bytes.size() != to.size()) {
    throw Error(ErrorCode::kShape, {.what = "a matrix of shared weights has another size",
                                    .file = impl_->path,
                                    .tensor = to_string(id),
                                    .expected = std::to_string(to.size()) + " bytes",
                                    .found = std::to_string(bytes.size())});
  }
  std::memcpy(to.data(), bytes.data(), bytes.size());
}

void SharedWeightsWriter::publish(uint64_t version) {
  SharedHeader& header = impl_->header();
  if (!impl_->is_open()) {
    throw Error(ErrorCode::kState, {.what = "no version of these shared weights is begun",
                                    .file = impl_->path,
                                    .hint = "call begin first"});
  }
  if (version != 0 && version <= header.version) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "versions of shared weights ascend",
                 .file = impl_->path,
                 .tensor = "version",
                 .expected = "more than " + std::to_string(header.version),
                 .found = std::to_string(version)});
  }
  const SharedLayout& layout = impl_->layout;
  header.checksum = checkpoint::hash_bytes(
      impl_->mapping.span(layout.data_begin, layout.file_bytes - layout.data_begin));
  header.version = version != 0 ? version : header.version + 1;
  __atomic_store_n(&header.sequence, header.sequence + 1, __ATOMIC_RELEASE);
}

uint64_t SharedWeightsWriter::version() const noexcept { return impl_->header().version; }

}  // namespace conclave::inline v0
