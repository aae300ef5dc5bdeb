#include "checkpoint/hash.h"
#include "checkpoint/shared/shared_layout.h"
#include "checkpoint/shared/shared_mapping.h"
#include "core/code_bits.h"
#include "core/weight_types.h"

#include "conclave/error.h"
#include "conclave/shared_weights.h"

#include <cstring>
#include <utility>

namespace conclave::inline v0 {

using checkpoint::SharedHeader;
using checkpoint::SharedLayout;
using checkpoint::SharedMapping;
using checkpoint::SharedPlace;

struct SharedWeights::Impl {
  std::string path;
  SharedMapping mapping;
  SharedHeader header;  // as it was when it was opened
  SharedLayout layout;

  uint64_t sequence() const {
    const auto* now = static_cast<const SharedHeader*>(static_cast<const void*>(mapping.data()));
    return __atomic_load_n(&now->sequence, __ATOMIC_ACQUIRE);
  }
};

namespace {

[[noreturn]] void refuse(const std::string& path, const char* what, const char* field,
                         std::string expected, std::string found) {
  throw Error(ErrorCode::kInvalidArgument, {.what = what,
                                            .file = path,
                                            .tensor = field,
                                            .expected = std::move(expected),
                                            .found = std::move(found)});
}

[[noreturn]] void refuse_change(const std::string& path, const char* what) {
  throw Error(ErrorCode::kFileChanged,
              {.what = what, .file = path, .hint = "open it again once a version is published"});
}

void check_size(const std::string& path, uint64_t expected, uint64_t found) {
  if (expected == found) return;
  refuse(path, "shared weights have another size than their header says", "file_bytes",
         std::to_string(expected), std::to_string(found));
}

// A copy: what is checked is what is used, whatever happens to the file.
SharedHeader read_header(const std::string& path, const SharedMapping& mapping) {
  SharedHeader header;
  if (mapping.bytes() < sizeof(header)) {
    refuse(path, "this file is too short for shared weights", "file_bytes",
           std::to_string(sizeof(header)) + " or more", std::to_string(mapping.bytes()));
  }
  const auto* now = static_cast<const SharedHeader*>(static_cast<const void*>(mapping.data()));
  const uint64_t sequence = __atomic_load_n(&now->sequence, __ATOMIC_ACQUIRE);
  std::memcpy(&header, mapping.data(), sizeof(header));
  header.sequence = sequence;
  if (std::memcmp(header.magic, checkpoint::kSharedMagic, sizeof(header.magic)) != 0) {
    refuse(path, "this file holds no shared weights of this version", "magic",
           checkpoint::kSharedMagic, "other bytes");
  }
  check_size(path, header.file_bytes, mapping.bytes());
  return header;
}

std::vector<SharedTensor> read_rows(const std::string& path, const SharedMapping& mapping,
                                    const SharedHeader& header) {
  const size_t bytes = checkpoint::bytes_of_rows(header, path);
  if (mapping.bytes() - sizeof(header) < bytes) {
    refuse(path, "the tensors of shared weights end beyond the file", "tensors",
           std::to_string(mapping.bytes()) + " bytes or less", std::to_string(bytes));
  }
  const std::byte* const first = mapping.data() + sizeof(header);
  const std::vector<std::byte> rows(first, first + bytes);
  if (checkpoint::hash_of(header, rows) != header.hash) {
    refuse(path, "the header of shared weights is damaged", "hash", std::to_string(header.hash),
           "another hash");
  }
  return checkpoint::parse_rows(header, rows, path);
}

}  // namespace

SharedWeights::SharedWeights(const std::filesystem::path& path, SharedChecksum checksum) {
  SharedMapping mapping = SharedMapping::open(path);
  const SharedHeader header = read_header(path.string(), mapping);
  SharedLayout layout =
      checkpoint::lay_out(read_rows(path.string(), mapping, header), path.string());
  check_size(path.string(), layout.file_bytes, mapping.bytes());
  impl_.reset(new Impl{path.string(), std::move(mapping), header, std::move(layout)});
  if (header.sequence == 0) refuse_change(path.string(), "shared weights were never published");
  if (header.sequence % 2 != 0) {
    refuse_change(path.string(),
                  "shared weights are being written, or their writer ended before it was done");
  }
  if (checksum == SharedChecksum::kVerify) {
    const uint64_t first = impl_->layout.data_begin;
    const uint64_t found =
        checkpoint::hash_bytes(impl_->mapping.span(first, impl_->layout.file_bytes - first));
    check_unchanged();
    if (found != header.checksum) {
      refuse_change(path.string(), "shared weights have another checksum than their writer gave");
    }
  }
  check_unchanged();
}

SharedWeights::SharedWeights(SharedWeights&&) noexcept = default;
SharedWeights& SharedWeights::operator=(SharedWeights&&) noexcept = default;
SharedWeights::~SharedWeights() = default;

uint64_t SharedWeights::version() const noexcept { return impl_->header.version; }
uint64_t SharedWeights::layer() const noexcept { return impl_->header.layer; }

std::vector<SharedTensor> SharedWeights::tensors() const {
  std::vector<SharedTensor> tensors;
  for (const SharedPlace& place : impl_->layout.places) tensors.push_back(place.tensor);
  return tensors;
}

void SharedWeights::check_unchanged() const {
  // Bytes that were read before may not be read after the mark.
  checkpoint::order_memory();
  if (impl_->sequence() == impl_->header.sequence &&
      impl_->mapping.bytes_of_file() == impl_->mapping.bytes()) {
    return;
  }
  refuse_change(impl_->path, "shared weights were written while they were read");
}

WeightInfo SharedWeights::describe(WeightId id) const {
  const SharedPlace* const place = impl_->layout.find(id);
  return place != nullptr ? place->tensor.info : WeightInfo{};
}

ConstTensorView SharedWeights::view(WeightId id, int64_t expert) const {
  const SharedPlace* const place = impl_->layout.find(id);
  const int64_t at = place != nullptr ? place->find(expert) : -1;
  if (at < 0) {
    throw Error(ErrorCode::kTensorMissing, {.what = "shared weights lack a matrix",
                                            .file = impl_->path,
                                            .tensor = locate(id, expert)});
  }
  return {.data = impl_->mapping.data() + place->first + static_cast<uint64_t>(at) * place->stride,
          .dtype = place->tensor.info.dtype,
          .shape = {place->tensor.info.rows, place->tensor.info.cols}};
}

void SharedWeights::read(WeightId id, int64_t expert, const WeightBlock& block,
                         std::span<std::byte> destination) const {
  const ConstTensorView matrix = view(id, expert);
  const int64_t cols = block.col_end - block.col_begin;
  const int64_t row_bytes = packed_bytes(matrix.dtype, matrix.shape[1]);
  std::byte* to = destination.data();
  for (int64_t row = block.row_begin; row < block.row_end; ++row) {
    copy_codes(static_cast<const std::byte*>(matrix.data) + row * row_bytes, block.col_begin, cols,
               bit_size(matrix.dtype), to);
    to += packed_bytes(matrix.dtype, cols);
  }
  check_unchanged();
}

std::string SharedWeights::locate(WeightId id, int64_t expert) const {
  return impl_->path + ": " + to_string(id) + ", expert " + std::to_string(expert);
}

}  // namespace conclave::inline v0
