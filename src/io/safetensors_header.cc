#include "io/safetensors_header.h"

#include "core/checked.h"
#include "io/json_cursor.h"
#include "io/safetensors_rules.h"
#include "io/text.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

namespace conclave::inline v0::io {
namespace {

constexpr std::string_view kMetadataKey = "__metadata__";
constexpr uint64_t kMaxOffset = std::numeric_limits<int64_t>::max();
constexpr std::string_view kFields = "dtype, shape and data_offsets";

class HeaderParser {
 public:
  HeaderParser(std::string_view json, uint64_t file_bytes, std::string_view file)
      : file_(file),
        cursor_(json, ErrorCode::kSafetensorsJson, file, kLengthBytes),
        data_begin_(kLengthBytes + json.size()),
        data_bytes_(file_bytes - data_begin_) {}

  SafetensorsHeader parse() {
    expect_object();
    for (bool first = true; !cursor_.try_consume('}'); first = false) {
      if (!first) cursor_.expect(',', "between tensors");
      const JsonString key = cursor_.string("before a tensor's name");
      decode(key, name_);
      cursor_.expect(':', "after a tensor's name");
      if (name_ == kMetadataKey) {
        parse_metadata();
      } else {
        parse_tensor();
      }
    }
    cursor_.expect_end();
    sort_by_offset();
    index_names();
    check_layout();
    return std::move(header_);
  }

 private:
  // Adds file and tensor to the error.
  [[noreturn]] void fail(ErrorCode code, ErrorDetail detail) const {
    detail.file = file_;
    if (!name_.empty()) detail.tensor = show_text(name_);
    throw Error(code, std::move(detail));
  }

  void expect_object() {
    const std::optional<char> first = cursor_.peek();
    constexpr std::string_view kOtherValues = "[\"-0123456789tfn";
    if (first && kOtherValues.find(*first) != std::string_view::npos) {
      fail(ErrorCode::kSafetensorsNotObject, {.what = "the header is not a JSON object",
                                              .expected = "'{'",
                                              .found = std::string(1, *first)});
    }
    cursor_.expect('{', "at the start of the header");
  }

  void decode(const JsonString& string, std::string& out) {
    if (!string.has_escapes) {
      out.assign(string.raw);
      return;
    }
    out.resize(string.raw.size());
    const std::optional<size_t> bytes = decode_json_string(string.raw, out.data());
    if (!bytes) cursor_.fail("half of a surrogate pair in the string that ends");
    out.resize(*bytes);
  }

  void parse_metadata() {
    if (std::exchange(has_metadata_, true)) {
      fail(ErrorCode::kSafetensorsDuplicateKey,
           {.what = "the key appears twice", .expected = "every key once"});
    }
    if (!cursor_.try_consume('{')) {
      fail(ErrorCode::kSafetensorsMetadata, {.what = "the metadata is not an object of strings"});
    }
    size_t bytes = 0;
    std::string key;
    std::string value;
    for (bool first = true; !cursor_.try_consume('}'); first = false) {
      if (!first) cursor_.expect(',', "between metadata entries");
      decode(cursor_.string("before a metadata key"), key);
      cursor_.expect(':', "after a metadata key");
      if (cursor_.peek() != '"') {
        fail(ErrorCode::kSafetensorsMetadata,
             {.what = fmt::format("the metadata entry {} is not a string", show_text(key))});
      }
      decode(cursor_.string("before a metadata value"), value);
      bytes += key.size() + value.size();
      if (bytes > kMaxMetadataBytes || header_.metadata.size() == kMaxMetadataEntries) {
        fail(ErrorCode::kSafetensorsMetadata,
             {.what = "the metadata is too large",
              .limit =
                  fmt::format("{} bytes in {} entries", kMaxMetadataBytes, kMaxMetadataEntries)});
      }
      if (!header_.metadata.emplace(key, value).second) {
        fail(ErrorCode::kSafetensorsDuplicateKey,
             {.what = fmt::format("the metadata entry {} appears twice", show_text(key)),
              .expected = "every key once"});
      }
    }
  }

  void parse_tensor() {
    check_tensor_name(name_, file_);
    if (header_.tensors.size() == kMaxTensors) {
      fail(ErrorCode::kSafetensorsTooManyTensors,
           {.what = "the header lists too many tensors", .limit = std::to_string(kMaxTensors)});
    }
    if (!cursor_.try_consume('{')) {
      fail(ErrorCode::kSafetensorsEntry,
           {.what = "the tensor's entry is not an object", .expected = std::string(kFields)});
    }
    TensorInfo& tensor = header_.tensors.emplace_back();
    tensor.name = name_;
    bool has_dtype = false;
    bool has_shape = false;
    bool has_offsets = false;
    std::array<uint64_t, 2> offsets{};
    for (bool first = true; !cursor_.try_consume('}'); first = false) {
      if (!first) cursor_.expect(',', "between fields of a tensor");
      decode(cursor_.string("before a field's name"), scratch_);
      cursor_.expect(':', "after a field's name");
      if (scratch_ == "dtype") {
        begin_field(has_dtype);
        tensor.dtype = parse_dtype_field();
      } else if (scratch_ == "shape") {
        begin_field(has_shape);
        parse_shape(tensor.shape);
      } else if (scratch_ == "data_offsets") {
        begin_field(has_offsets);
        offsets = parse_offsets();
      } else {
        fail(ErrorCode::kSafetensorsEntry, {.what = "the entry has an unknown field",
                                            .expected = std::string(kFields),
                                            .found = show_text(scratch_)});
      }
    }
    if (!has_dtype || !has_shape || !has_offsets) {
      fail(ErrorCode::kSafetensorsEntry, {.what = "the entry lacks a field",
                                          .expected = std::string(kFields),
                                          .found = !has_dtype   ? "no dtype"
                                                   : !has_shape ? "no shape"
                                                                : "no data_offsets"});
    }
    place(tensor, offsets);
  }

  void begin_field(bool& seen) {
    if (std::exchange(seen, true)) {
      fail(ErrorCode::kSafetensorsEntry, {.what = "the entry repeats a field",
                                          .expected = "every field once",
                                          .found = show_text(scratch_)});
    }
  }

  DType parse_dtype_field() {
    if (cursor_.peek() != '"') {
      fail(ErrorCode::kSafetensorsDType, {.what = "the dtype is not a string"});
    }
    decode(cursor_.string("before a dtype"), scratch_);
    const std::optional<DType> dtype = parse_dtype(scratch_);
    // parse_dtype also accepts the names that configurations use.
    if (!dtype || to_string(*dtype) != scratch_ || !is_safetensors_type(*dtype)) {
      fail(ErrorCode::kSafetensorsDType, {.what = "the dtype is unknown",
                                          .expected = "a safetensors dtype such as \"BF16\"",
                                          .found = show_text(scratch_)});
    }
    return *dtype;
  }

  uint64_t parse_integer(std::string_view field) {
    const std::optional<char> first = cursor_.peek();
    if (!first || (*first != '-' && (*first < '0' || *first > '9'))) {
      fail(ErrorCode::kSafetensorsInteger,
           {.what = fmt::format("{} holds something else than integers", field)});
    }
    const JsonNumber number = cursor_.number();
    const std::optional<uint64_t> value = to_uint64(number);
    if (!value) {
      fail(ErrorCode::kSafetensorsInteger,
           {.what = fmt::format("{} holds a number that is no plain integer", field),
            .expected = "digits only, below 2^64",
            .found = show_text(number.text)});
    }
    return *value;
  }

  void parse_shape(std::vector<int64_t>& shape) {
    if (!cursor_.try_consume('[')) {
      fail(ErrorCode::kSafetensorsShape, {.what = "the shape is not an array"});
    }
    dims_.clear();
    for (bool first = true; !cursor_.try_consume(']'); first = false) {
      if (!first) cursor_.expect(',', "between dimensions");
      const uint64_t dim = parse_integer("shape");
      if (dim > kMaxOffset) {
        fail(ErrorCode::kSafetensorsSizeOverflow, {.what = "a dimension is too large",
                                                   .found = std::to_string(dim),
                                                   .limit = "2^63 - 1"});
      }
      if (dims_.size() == kMaxTensorRank) {
        fail(ErrorCode::kSafetensorsShape, {.what = "the shape has too many dimensions",
                                            .limit = std::to_string(kMaxTensorRank)});
      }
      dims_.push_back(static_cast<int64_t>(dim));
    }
    shape.assign(dims_.begin(), dims_.end());
  }

  std::array<uint64_t, 2> parse_offsets() {
    const auto require = [&](bool condition) {
      if (!condition) {
        fail(ErrorCode::kSafetensorsOffsets,
             {.what = "data_offsets is not an array of two integers"});
      }
    };
    std::array<uint64_t, 2> offsets{};
    require(cursor_.try_consume('['));
    require(cursor_.peek() != ']');
    offsets[0] = parse_integer("data_offsets");
    require(cursor_.try_consume(','));
    offsets[1] = parse_integer("data_offsets");
    require(cursor_.try_consume(']'));
    return offsets;
  }

  // Checks one tensor on its own: order of its offsets, and its size by shape and dtype.
  void place(TensorInfo& tensor, const std::array<uint64_t, 2>& offsets) {
    const auto [begin, end] = offsets;
    if (begin > end || end > kMaxOffset - data_begin_) {
      fail(ErrorCode::kSafetensorsOffsets,
           {.what = begin > end ? "data_offsets end before they begin"
                                : "data_offsets lie beyond any file",
            .found = fmt::format("[{}, {}]", begin, end)});
    }
    const uint64_t bytes = tensor_bytes(tensor.name, tensor.dtype, tensor.shape, file_);
    if (bytes != end - begin) {
      fail(ErrorCode::kSafetensorsSizeMismatch,
           {.what = "data_offsets disagree with shape and dtype",
            .expected =
                fmt::format("{} bytes for {}", bytes, describe_tensor(tensor.dtype, tensor.shape)),
            .found = fmt::format("{} bytes", end - begin)});
    }
    tensor.file_offset = data_begin_ + begin;
    tensor.bytes = bytes;
  }

  void sort_by_offset() {
    std::vector<TensorInfo>& tensors = header_.tensors;
    const auto before = [](const TensorInfo& a, const TensorInfo& b) {
      if (a.file_offset != b.file_offset) return a.file_offset < b.file_offset;
      return a.bytes < b.bytes;
    };
    if (std::is_sorted(tensors.begin(), tensors.end(), before)) return;
    // Sorting numbers moves each entry, with its strings, only once.
    std::vector<uint32_t> order(tensors.size());
    std::iota(order.begin(), order.end(), 0U);
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      if (before(tensors[a], tensors[b])) return true;
      return !before(tensors[b], tensors[a]) && a < b;
    });
    std::vector<TensorInfo> sorted;
    sorted.reserve(tensors.size());
    for (const uint32_t i : order) sorted.push_back(std::move(tensors[i]));
    tensors = std::move(sorted);
  }

  void index_names() {
    const std::vector<TensorInfo>& tensors = header_.tensors;
    header_.names.reserve(tensors.size());
    for (uint32_t i = 0; i < tensors.size(); ++i) header_.names.add(0, tensors[i].name, i);
    const auto twins =
        header_.names.build([&](uint32_t i) { return std::string_view(tensors[i].name); });
    if (!twins) return;
    name_ = tensors[twins->first].name;
    fail(ErrorCode::kSafetensorsDuplicateKey,
         {.what = "the tensor is listed twice", .expected = "every name once"});
  }

  // Together the tensors must cover the data exactly: no hole, no overlap, nothing behind.
  void check_layout() {
    uint64_t end = 0;
    for (const TensorInfo& tensor : header_.tensors) {
      const uint64_t begin = tensor.file_offset - data_begin_;
      if (begin != end) {
        name_ = tensor.name;
        fail(begin > end ? ErrorCode::kSafetensorsHole : ErrorCode::kSafetensorsOverlap,
             {.what = begin > end ? "no tensor owns the bytes before this one"
                                  : "the tensor overlaps the one before it",
              .expected = fmt::format("data_offsets that begin at {}", end),
              .found = std::to_string(begin)});
      }
      end = begin + tensor.bytes;
    }
    if (end == data_bytes_) return;
    const bool is_cut = end > data_bytes_;
    name_ = is_cut ? first_beyond_the_file() : "";
    fail(is_cut ? ErrorCode::kSafetensorsTruncatedData : ErrorCode::kSafetensorsTrailingData,
         {.what = is_cut ? "the file ends before the tensor does"
                         : "bytes behind the last tensor belong to none",
          .expected = fmt::format("{} bytes", data_begin_ + end),
          .found = fmt::format("{} bytes", data_begin_ + data_bytes_),
          .hint = kDamagedFileHint});
  }

  const std::string& first_beyond_the_file() const {
    return std::find_if(header_.tensors.begin(), header_.tensors.end(),
                        [&](const TensorInfo& tensor) {
                          return tensor.file_offset + tensor.bytes > data_begin_ + data_bytes_;
                        })
        ->name;
  }

  std::string_view file_;
  JsonCursor cursor_;
  uint64_t data_begin_;
  uint64_t data_bytes_;
  SafetensorsHeader header_;
  std::string name_;     // name of the tensor being read, for messages
  std::string scratch_;  // decoded text that does not outlive a step
  std::vector<int64_t> dims_;
  bool has_metadata_ = false;
};

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view json, uint64_t file_bytes,
                                           std::string_view file) {
  if (const std::optional<size_t> bad = find_invalid_utf8(json)) {
    throw Error(ErrorCode::kSafetensorsUtf8,
                {.what = fmt::format("the header is not UTF-8 at byte {}", kLengthBytes + *bad),
                 .file = std::string(file)});
  }
  return HeaderParser(json, file_bytes, file).parse();
}

}  // namespace conclave::inline v0::io
