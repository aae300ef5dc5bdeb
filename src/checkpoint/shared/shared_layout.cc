#include "checkpoint/shared/shared_layout.h"

#include "checkpoint/hash.h"
#include "core/checked.h"
#include "core/weight_types.h"

#include "conclave/error.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <string_view>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr int64_t kMostMatrices = int64_t{1} << 20;
constexpr int64_t kMostElements = int64_t{1} << 40;  // one matrix has at most so many
constexpr uint64_t kAlignment = 64;

[[noreturn]] void refuse(const std::string& file, std::string what, std::string tensor,
                         std::string found) {
  throw Error(ErrorCode::kInvalidArgument, {.what = std::move(what),
                                            .file = file,
                                            .tensor = std::move(tensor),
                                            .found = std::move(found)});
}

std::optional<uint64_t> aligned(uint64_t bytes) {
  const auto padded = checked_add(bytes, kAlignment - 1);
  if (!padded) return std::nullopt;
  return *padded / kAlignment * kAlignment;
}

void check_info(const SharedTensor& tensor, const std::string& file) {
  const WeightInfo& info = tensor.info;
  const std::string name = to_string(tensor.id);
  const auto refuse_number = [&](const char* what, int64_t number) {
    refuse(file, what, name, std::to_string(number));
  };
  if (info.count < 1 || info.count > kMostMatrices) {
    refuse_number("shared weights have another number of matrices than 1 to 2^20", info.count);
  }
  if (info.rows < 1 || info.cols < 1) {
    refuse_number("shared weights have no rows or no columns", std::min(info.rows, info.cols));
  }
  const auto elements = checked_mul(info.rows, info.cols);
  if (!elements || *elements > kMostElements) {
    refuse_number("a matrix of shared weights has more than 2^40 elements", info.rows);
  }
  if (bit_size(info.dtype) == 0 || info.cols * bit_size(info.dtype) % 8 != 0) {
    refuse_number("rows of shared weights do not end with a byte", info.cols);
  }
}

void check_experts(const SharedTensor& tensor, const std::string& file) {
  std::set<int32_t> seen;
  for (const int32_t expert : tensor.experts) {
    if (expert >= 0 && expert < tensor.info.count && seen.insert(expert).second) continue;
    refuse(file, "shared weights list an expert that is none, or twice", to_string(tensor.id),
           std::to_string(expert));
  }
}

std::string_view text_of(std::span<const char> field) {
  return {field.data(), static_cast<size_t>(std::ranges::find(field, '\0') - field.begin())};
}

void put_text(std::string_view text, std::span<char> field) {
  std::memcpy(field.data(), text.data(), std::min(text.size(), field.size() - 1));
}

WeightId id_of(std::string_view name, const std::string& file) {
  for (const WeightId id : weights::kAll) {
    if (to_string(id) == name) return id;
  }
  refuse(file, "there are no weights of this name", "tensor", std::string(name.substr(0, 48)));
}

}  // namespace

int64_t SharedPlace::num_matrices() const {
  return tensor.experts.empty() ? tensor.info.count : std::ssize(tensor.experts);
}

int64_t SharedPlace::find(int64_t expert) const {
  if (expert < 0 || expert >= tensor.info.count) return -1;
  if (tensor.experts.empty()) return expert;
  const auto found = std::ranges::find(tensor.experts, expert);
  return found == tensor.experts.end() ? -1 : found - tensor.experts.begin();
}

const SharedPlace* SharedLayout::find(WeightId id) const {
  const auto found =
      std::ranges::find_if(places, [&](const SharedPlace& one) { return one.tensor.id == id; });
  return found == places.end() ? nullptr : &*found;
}

SharedLayout lay_out(std::span<const SharedTensor> tensors, const std::string& file) {
  SharedLayout layout;
  if (tensors.empty()) refuse(file, "shared weights have no tensors", "tensors", "none");
  uint64_t rows = sizeof(SharedHeader) + tensors.size() * sizeof(SharedRow);
  for (const SharedTensor& tensor : tensors) rows += tensor.experts.size() * sizeof(int32_t);
  std::optional<uint64_t> end = aligned(rows);
  layout.data_begin = end.value_or(0);
  for (const SharedTensor& tensor : tensors) {
    check_info(tensor, file);
    check_experts(tensor, file);
    if (layout.find(tensor.id) != nullptr) {
      refuse(file, "shared weights have a tensor twice", to_string(tensor.id), "another one");
    }
    SharedPlace place{.tensor = tensor};
    place.matrix_bytes =
        static_cast<uint64_t>(tensor.info.rows * packed_bytes(tensor.info.dtype, tensor.info.cols));
    place.stride = aligned(place.matrix_bytes).value_or(0);
    place.first = end.value_or(0);
    const auto bytes = checked_mul(place.stride, static_cast<uint64_t>(place.num_matrices()));
    end = end && bytes ? checked_add(*end, *bytes) : std::nullopt;
    layout.places.push_back(std::move(place));
  }
  if (!end || *end > uint64_t{INT64_MAX}) {
    throw Error(ErrorCode::kSizeOverflow,
                {.what = "shared weights do not fit 64 bits", .file = file});
  }
  layout.file_bytes = *end;
  return layout;
}

std::vector<std::byte> pack_rows(std::span<const SharedTensor> tensors) {
  std::vector<std::byte> bytes;
  const auto put = [&](std::span<const std::byte> more) {
    bytes.insert(bytes.end(), more.begin(), more.end());
  };
  for (const SharedTensor& tensor : tensors) {
    SharedRow row{.count = tensor.info.count,
                  .rows = tensor.info.rows,
                  .cols = tensor.info.cols,
                  .num_experts = std::ssize(tensor.experts)};
    put_text(to_string(tensor.id), row.name);
    put_text(to_string(tensor.info.dtype), row.dtype);
    put(std::as_bytes(std::span(&row, 1)));
  }
  for (const SharedTensor& tensor : tensors) put(std::as_bytes(std::span(tensor.experts)));
  return bytes;
}

std::vector<SharedTensor> parse_rows(const SharedHeader& header, std::span<const std::byte> bytes,
                                     const std::string& file) {
  std::vector<SharedTensor> tensors;
  uint64_t left = header.num_experts;
  const std::byte* list = bytes.data() + header.num_tensors * sizeof(SharedRow);
  for (size_t i = 0; i < header.num_tensors; ++i) {
    SharedRow row;
    std::memcpy(&row, bytes.data() + i * sizeof(SharedRow), sizeof(row));
    const std::string_view type = text_of(row.dtype);
    const std::optional<DType> dtype = parse_dtype(type);
    if (!dtype) {
      refuse(file, "shared weights have an unknown type", "dtype", std::string(type.substr(0, 16)));
    }
    if (row.num_experts < 0 || static_cast<uint64_t>(row.num_experts) > left) {
      refuse(file, "a list of experts is longer than all of them", "experts",
             std::to_string(row.num_experts));
    }
    SharedTensor tensor{.id = id_of(text_of(row.name), file),
                        .info = {row.count, row.rows, row.cols, *dtype}};
    tensor.experts.resize(static_cast<size_t>(row.num_experts));
    const size_t list_bytes = tensor.experts.size() * sizeof(int32_t);
    if (list_bytes != 0) std::memcpy(tensor.experts.data(), list, list_bytes);
    list += list_bytes;
    left -= static_cast<uint64_t>(row.num_experts);
    tensors.push_back(std::move(tensor));
  }
  if (left != 0) refuse(file, "lists of experts end early", "experts", std::to_string(left));
  return tensors;
}

size_t bytes_of_rows(const SharedHeader& header, const std::string& file) {
  if (header.num_tensors > WeightId::kCount) {
    refuse(file, "shared weights have more tensors than there are", "tensors",
           std::to_string(header.num_tensors));
  }
  if (header.num_experts > header.file_bytes / sizeof(int32_t)) {
    refuse(file, "lists of experts are longer than the file", "experts",
           std::to_string(header.num_experts));
  }
  return header.num_tensors * sizeof(SharedRow) + header.num_experts * sizeof(int32_t);
}

uint64_t hash_of(const SharedHeader& header, std::span<const std::byte> rows) {
  StreamHash hash;
  hash.update(std::as_bytes(std::span(&header, 1)).first(offsetof(SharedHeader, hash)));
  hash.update(rows);
  return hash.digest();
}

}  // namespace conclave::inline v0::checkpoint
