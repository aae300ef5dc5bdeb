#include "io/gguf/header.h"

#include "core/checked.h"
#include "io/gguf/tensor_rules.h"
#include "io/safetensors_rules.h"
#include "io/text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace conclave::inline v0::io {
namespace {

constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr uint32_t kOldestVersion = 2;
constexpr uint32_t kNewestVersion = 3;
constexpr std::string_view kAlignmentKey = "general.alignment";
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kLeastAlignment = 8;
constexpr uint64_t kMaxAlignment = 65'536;
// The format's limit.
constexpr uint64_t kMaxKeyBytes = 65'535;
// These limits are ours: far above any real file, low enough to bound memory.
constexpr uint64_t kMaxEntries = 262'144;
// The least bytes that an entry and a tensor take, so that no count can claim more than fits.
constexpr uint64_t kLeastEntryBytes = 8 + 1 + 4 + 1;
constexpr uint64_t kLeastTensorBytes = 8 + 1 + 4 + 4 + 8;

// Whether tensors lie behind the header that lists them.
enum class GgufData : uint8_t { kFollows, kIsElsewhere };

class HeaderParser {
 public:
  HeaderParser(ReadBytes read, uint64_t file_bytes, std::string_view file, GgufData data)
      : cursor_(std::move(read), file_bytes, file), file_bytes_(file_bytes), data_(data) {}

  GgufHeader parse() {
    parse_start();
    for (uint64_t i = 0; i < num_entries_; ++i) parse_entry();
    index_entries();
    header_.alignment = find_alignment();
    for (uint64_t i = 0; i < num_tensors_; ++i) parse_tensor();
    index_tensors();
    place_tensors();
    return std::move(header_);
  }

 private:
  [[noreturn]] void fail(ErrorCode code, ErrorDetail detail) const {
    detail.file = std::string(cursor_.file());
    if (detail.tensor.empty() && !name_.empty()) detail.tensor = show_name(name_);
    throw Error(code, std::move(detail));
  }

  void parse_start() {
    const auto magic = cursor_.number<uint32_t>("the start of a GGUF header");
    if (magic != kMagic) {
      fail(ErrorCode::kGgufMagic, {.what = "the file is no GGUF file",
                                   .expected = "\"GGUF\"",
                                   .hint = "name a .gguf file, or the directory of a model"});
    }
    header_.version = cursor_.number<uint32_t>("the version");
    if (header_.version < kOldestVersion || header_.version > kNewestVersion) {
      const uint32_t swapped = __builtin_bswap32(header_.version);
      const bool is_swapped = swapped >= 1 && swapped <= kNewestVersion;
      fail(ErrorCode::kGgufVersion,
           {.what = is_swapped ? "the file is big-endian" : "the file's version is not known",
            .expected = fmt::format("version {} or {}", kOldestVersion, kNewestVersion),
            .found = std::to_string(header_.version),
            .hint = is_swapped ? "convert it with gguf-py's gguf_convert_endian"
                               : "convert the model with a newer llama.cpp"});
    }
    num_tensors_ = parse_count("tensors", kMaxTensors, kLeastTensorBytes);
    num_entries_ = parse_count("keys", kMaxEntries, kLeastEntryBytes);
    header_.entries.reserve(num_entries_);
  }

  uint64_t parse_count(const char* things, uint64_t limit, uint64_t least_bytes) {
    const auto count = cursor_.number<uint64_t>("the counts of tensors and keys");
    const uint64_t most = std::min(limit, cursor_.remaining() / least_bytes);
    if (count <= most) return count;
    fail(ErrorCode::kGgufCount, {.what = fmt::format("the header claims too many {}", things),
                                 .found = std::to_string(count),
                                 .limit = fmt::format("{} in this file", most),
                                 .hint = kDamagedFileHint});
  }

  void check_text(ErrorCode code, const char* what) {
    if (!name_.empty() && is_plain_text(name_)) return;
    const std::string shown = show_text(name_);
    name_.clear();
    fail(code,
         {.what = fmt::format("{} is not plain UTF-8 text, or is empty", what), .found = shown});
  }

  void parse_entry() {
    name_ = cursor_.string("a key", kMaxKeyBytes);
    check_text(ErrorCode::kGgufKey, "a key");
    const uint64_t begin = cursor_.offset();
    GgufValue value = read_gguf_value(cursor_, name_);
    header_.entries.push_back({.key = std::move(name_),
                               .value = std::move(value),
                               .value_offset = begin,
                               .value_bytes = cursor_.offset() - begin});
    name_.clear();
  }

  void index_entries() {
    header_.entry_names.reserve(header_.entries.size());
    for (uint32_t i = 0; i < header_.entries.size(); ++i) {
      header_.entry_names.add(0, header_.entries[i].key, i);
    }
    const auto twins = header_.entry_names.build(
        [&](uint32_t i) { return std::string_view(header_.entries[i].key); });
    if (!twins) return;
    name_ = header_.entries[twins->first].key;
    fail(ErrorCode::kGgufDuplicateKey,
         {.what = "the key stands twice in the header", .expected = "every key once"});
  }

  uint64_t find_alignment() {
    const GgufValue* value = header_.find_value(kAlignmentKey);
    if (value == nullptr) return kDefaultAlignment;
    const auto* alignment = std::get_if<uint64_t>(value);
    if (alignment != nullptr && *alignment >= kLeastAlignment && *alignment <= kMaxAlignment &&
        std::has_single_bit(*alignment)) {
      return *alignment;
    }
    fail(ErrorCode::kGgufAlignment,
         {.what = "general.alignment is not usable",
          .expected = "a power of two",
          .found = alignment != nullptr ? std::to_string(*alignment) : "a value of another type",
          .limit = fmt::format("{} to {}", kLeastAlignment, kMaxAlignment)});
  }

  void parse_tensor() {
    constexpr const char* kTensor = "the list of tensors";
    GgufTensor tensor;
    name_ = cursor_.string(kTensor, kMaxGgufNameBytes);
    check_text(ErrorCode::kGgufName, "the name of a tensor");
    tensor.rank = cursor_.number<uint32_t>(kTensor);
    if (tensor.rank > GgufTensor::kMaxRank) {
      fail(ErrorCode::kGgufShape, {.what = "the tensor has too many dimensions",
                                   .found = std::to_string(tensor.rank),
                                   .limit = std::to_string(GgufTensor::kMaxRank)});
    }
    // The file gives the length of a row first.
    for (size_t i = tensor.rank; i-- > 0;) tensor.dims[i] = parse_dim();
    tensor.type =
        &require_gguf_type(cursor_.number<uint32_t>("the type of a tensor"), name_, cursor_.file());
    tensor.name = std::move(name_);
    name_.clear();
    tensor.bytes = gguf_tensor_bytes(tensor, cursor_.file());
    // Until place_tensors: from the start of the data.
    tensor.file_offset = cursor_.number<uint64_t>(kTensor);
    header_.tensors.push_back(std::move(tensor));
  }

  int64_t parse_dim() {
    const auto dim = cursor_.number<uint64_t>("the shape of a tensor");
    constexpr auto kMaxDim = static_cast<uint64_t>(INT64_MAX);
    if (dim >= 1 && dim <= kMaxDim) return static_cast<int64_t>(dim);
    fail(dim == 0 ? ErrorCode::kGgufShape : ErrorCode::kGgufSizeOverflow,
         {.what = dim == 0 ? "a dimension of the tensor is 0" : "a dimension is too large",
          .found = std::to_string(dim),
          .limit = "1 to 2^63 - 1"});
  }

  void index_tensors() {
    header_.tensor_names.reserve(header_.tensors.size());
    for (uint32_t i = 0; i < header_.tensors.size(); ++i) {
      header_.tensor_names.add(0, header_.tensors[i].name, i);
    }
    const auto twins = header_.tensor_names.build(
        [&](uint32_t i) { return std::string_view(header_.tensors[i].name); });
    if (!twins) return;
    name_ = header_.tensors[twins->first].name;
    fail(ErrorCode::kGgufDuplicateTensor,
         {.what = "the tensor is listed twice", .expected = "every name once"});
  }

  std::optional<uint64_t> aligned(uint64_t offset) const {
    const auto raised = checked_add(offset, header_.alignment - 1);
    if (!raised) return std::nullopt;
    return *raised / header_.alignment * header_.alignment;
  }

  // Tensors lie one behind the other, each at the next multiple of the alignment. Behind the last
  // one there may be bytes up to such a multiple, and no others.
  void place_tensors() {
    const uint64_t header_end = cursor_.offset();
    const uint64_t data_begin = *aligned(header_end);
    uint64_t end = header_end;
    for (GgufTensor& tensor : header_.tensors) {
      name_ = tensor.name;
      const std::optional<uint64_t> begin = aligned(end);
      const auto stated = checked_add(data_begin, tensor.file_offset);
      if (!begin || stated != *begin) {
        fail(ErrorCode::kGgufOffset,
             {.what = "the tensor does not lie behind the one before it",
              .expected = begin ? fmt::format("offset {}", *begin - data_begin) : "a smaller file",
              .found = fmt::format("offset {}", tensor.file_offset)});
      }
      tensor.file_offset = *begin;
      const auto tensor_end = checked_add(*begin, tensor.bytes);
      if (!tensor_end || (data_ == GgufData::kFollows && *tensor_end > file_bytes_)) {
        fail(ErrorCode::kGgufTruncatedData,
             {.what = "the file ends before the tensor does",
              .expected = fmt::format("{} bytes of {} from offset {} on", tensor.bytes,
                                      describe_tensor(tensor), *begin),
              .found = fmt::format("a file of {} bytes", file_bytes_),
              .hint = kDamagedFileHint});
      }
      end = *tensor_end;
    }
    name_.clear();
    if (data_ == GgufData::kFollows && file_bytes_ > *aligned(end)) {
      fail(ErrorCode::kGgufTrailingData,
           {.what = "bytes behind the last tensor belong to none",
            .expected = fmt::format("at most {} bytes", *aligned(end)),
            .found = fmt::format("{} bytes", file_bytes_)});
    }
  }

  GgufCursor cursor_;
  uint64_t file_bytes_;
  GgufData data_;
  GgufHeader header_;
  uint64_t num_tensors_ = 0;
  uint64_t num_entries_ = 0;
  std::string name_;  // the key or tensor being read, for messages
};

}  // namespace

const GgufValue* GgufHeader::find_value(std::string_view key) const noexcept {
  const auto found =
      entry_names.find(0, key, [&](uint32_t i) { return std::string_view(entries[i].key); });
  return found ? &entries[*found].value : nullptr;
}

const GgufTensor* GgufHeader::find_tensor(std::string_view name) const noexcept {
  const auto found =
      tensor_names.find(0, name, [&](uint32_t i) { return std::string_view(tensors[i].name); });
  return found ? &tensors[*found] : nullptr;
}

GgufHeader parse_gguf_header(ReadBytes read, uint64_t file_bytes, std::string_view file) {
  return HeaderParser(std::move(read), file_bytes, file, GgufData::kFollows).parse();
}

GgufHeader parse_gguf_header(std::span<const std::byte> bytes, std::string_view origin) {
  const ReadBytes read = [&](uint64_t offset, std::span<std::byte> destination) {
    std::ranges::copy(bytes.subspan(offset, destination.size()), destination.begin());
  };
  return HeaderParser(read, bytes.size(), origin, GgufData::kIsElsewhere).parse();
}

std::string describe_tensor(const GgufTensor& tensor) {
  return fmt::format("{} [{}]", tensor.type != nullptr ? tensor.type->name : "?",
                     fmt::join(tensor.shape(), ", "));
}

}  // namespace conclave::inline v0::io
