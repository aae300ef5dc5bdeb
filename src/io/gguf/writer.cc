#include "core/checked.h"
#include "io/gguf/types.h"
#include "io/new_file.h"
#include "io/text.h"

#include "conclave/error.h"
#include "conclave/gguf.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr uint32_t kVersion = 3;
constexpr size_t kMaxAxes = 4;
constexpr size_t kMaxNameBytes = 64;
constexpr uint64_t kLeastAlignment = 8;
constexpr uint64_t kMaxAlignment = 65'536;
// The format calls its types of numbers so.
constexpr uint32_t kU16 = 2;
constexpr uint32_t kU32 = 4;
constexpr uint32_t kI32 = 5;
constexpr uint32_t kF32 = 6;
constexpr uint32_t kBool = 7;
constexpr uint32_t kText = 8;
constexpr uint32_t kArray = 9;

template <class T>
void append(std::vector<std::byte>& bytes, T number) {
  static_assert(std::endian::native == std::endian::little);
  const auto* const begin = static_cast<const std::byte*>(static_cast<const void*>(&number));
  bytes.insert(bytes.end(), begin, begin + sizeof(T));
}

void append_text(std::vector<std::byte>& bytes, std::string_view text) {
  append(bytes, uint64_t{text.size()});
  const auto characters = std::as_bytes(std::span(text));
  bytes.insert(bytes.end(), characters.begin(), characters.end());
}

template <class T>
GgufKey key_of(std::string name, uint32_t type, T value) {
  GgufKey key{.name = std::move(name), .value = {}};
  append(key.value, type);
  append(key.value, value);
  return key;
}

GgufKey array_of(std::string name, uint32_t type, size_t count) {
  GgufKey key = key_of(std::move(name), kArray, type);
  append(key.value, uint64_t{count});
  return key;
}

struct Declared {
  std::string name;
  const io::GgufType* type = nullptr;
  std::vector<int64_t> shape;
  uint64_t offset = 0;  // from the start of the data
  uint64_t bytes = 0;
};

const io::GgufType& type_of(std::string_view name) {
  if (const io::GgufType* type = io::find_gguf_type(name)) return *type;
  throw Error(ErrorCode::kGgufTensorType,
              {.what = "GGUF files have no such type", .found = io::show_text(name)});
}

}  // namespace

GgufKey GgufKey::of_u16(std::string name, uint16_t value) {
  return key_of(std::move(name), kU16, value);
}
GgufKey GgufKey::of_u32(std::string name, uint32_t value) {
  return key_of(std::move(name), kU32, value);
}
GgufKey GgufKey::of_i32(std::string name, int32_t value) {
  return key_of(std::move(name), kI32, value);
}
GgufKey GgufKey::of_f32(std::string name, float value) {
  return key_of(std::move(name), kF32, value);
}
GgufKey GgufKey::of_bool(std::string name, bool value) {
  return key_of(std::move(name), kBool, static_cast<uint8_t>(value));
}
GgufKey GgufKey::of_text(std::string name, std::string_view value) {
  GgufKey key{.name = std::move(name), .value = {}};
  append(key.value, kText);
  append_text(key.value, value);
  return key;
}

GgufKey GgufKey::of_texts(std::string name, std::span<const std::string> values) {
  GgufKey key = array_of(std::move(name), kText, values.size());
  for (const std::string& value : values) append_text(key.value, value);
  return key;
}
GgufKey GgufKey::of_i32s(std::string name, std::span<const int32_t> values) {
  GgufKey key = array_of(std::move(name), kI32, values.size());
  for (const int32_t value : values) append(key.value, value);
  return key;
}
GgufKey GgufKey::of_f32s(std::string name, std::span<const float> values) {
  GgufKey key = array_of(std::move(name), kF32, values.size());
  for (const float value : values) append(key.value, value);
  return key;
}

std::string_view gguf_type_name(uint32_t id) {
  if (const io::GgufType* type = io::find_gguf_type(id)) return type->name;
  const std::string_view removed = io::removed_gguf_type(id);
  throw Error(
      ErrorCode::kGgufTensorType,
      {.what = removed.empty() ? "GGUF files have no type of this number"
                               : "the type of this number was removed from GGUF",
       .expected = "the number of a type of ggml",
       .found = removed.empty() ? std::to_string(id) : fmt::format("{} ({})", removed, id)});
}

uint32_t gguf_type_number(std::string_view name) { return type_of(name).id; }

uint64_t gguf_row_bytes(std::string_view type_name, int64_t elements) {
  const io::GgufType& type = type_of(type_name);
  const auto bytes = elements % type.block_elements == 0
                         ? checked_mul<int64_t>(elements / type.block_elements, type.block_bytes)
                         : std::nullopt;
  if (bytes && elements > 0) return static_cast<uint64_t>(*bytes);
  throw Error(ErrorCode::kGgufShape,
              {.what = fmt::format("a row does not hold whole blocks of {}", type.name),
               .expected = fmt::format("a multiple of {}", type.block_elements),
               .found = std::to_string(elements)});
}

struct GgufWriter::Impl {
  Impl(std::filesystem::path path, std::span<const GgufKey> keys_in, uint64_t alignment_in)
      : file(std::move(path)), keys(keys_in.begin(), keys_in.end()), alignment(alignment_in) {
    if (std::has_single_bit(alignment) && alignment >= kLeastAlignment &&
        alignment <= kMaxAlignment) {
      return;
    }
    fail(ErrorCode::kGgufAlignment,
         {.what = "tensors cannot be aligned so",
          .expected = "a power of two",
          .found = std::to_string(alignment),
          .limit = fmt::format("{} to {}", kLeastAlignment, kMaxAlignment)});
  }

  [[noreturn]] void fail(ErrorCode code, ErrorDetail detail) const {
    detail.file = file.path().string();
    throw Error(code, std::move(detail));
  }

  uint64_t aligned(uint64_t offset) const {
    return (offset + alignment - 1) / alignment * alignment;
  }
  uint64_t data_end() const {
    return tensors.empty() ? 0 : tensors.back().offset + tensors.back().bytes;
  }

  std::vector<std::byte> header() const {
    std::vector<std::byte> bytes;
    append(bytes, kMagic);
    append(bytes, kVersion);
    append(bytes, uint64_t{tensors.size()});
    append(bytes, uint64_t{keys.size()});
    for (const GgufKey& key : keys) {
      append_text(bytes, key.name);
      bytes.insert(bytes.end(), key.value.begin(), key.value.end());
    }
    for (const Declared& tensor : tensors) {
      append_text(bytes, tensor.name);
      append(bytes, static_cast<uint32_t>(tensor.shape.size()));
      // The file gives the length of a row first.
      for (size_t i = tensor.shape.size(); i-- > 0;) append(bytes, tensor.shape[i]);
      append(bytes, tensor.type->id);
      append(bytes, tensor.offset);
    }
    bytes.resize(aligned(bytes.size()));
    return bytes;
  }

  void begin() {
    if (file.is_begun()) return;
    file.begin();
    file.write(header());
  }

  void pad_to(uint64_t offset) {
    const std::vector<std::byte> zeros(offset - written);
    file.write(zeros);
    written = offset;
  }

  // Writes as much of the bytes as the tensor takes that is under way, and returns the rest.
  std::span<const std::byte> write_some(std::span<const std::byte> bytes) {
    const Declared& tensor = tensors[current];
    if (written < tensor.offset) pad_to(tensor.offset);
    const uint64_t room = tensor.offset + tensor.bytes - written;
    const auto now = bytes.first(std::min<uint64_t>(room, bytes.size()));
    file.write(now);
    written += now.size();
    if (now.size() == room) ++current;
    return bytes.subspan(now.size());
  }

  io::NewFile file;
  std::vector<GgufKey> keys;
  uint64_t alignment = 0;
  std::vector<Declared> tensors;
  std::set<std::string, std::less<>> names;
  size_t current = 0;    // the tensor that is being written
  uint64_t written = 0;  // bytes of the data, those between tensors too
  bool is_finished = false;
};

GgufWriter::GgufWriter(std::filesystem::path path, std::span<const GgufKey> keys,
                       uint64_t alignment)
    : impl_(std::make_unique<Impl>(std::move(path), keys, alignment)) {}
GgufWriter::GgufWriter(GgufWriter&&) noexcept = default;
GgufWriter::~GgufWriter() = default;

void GgufWriter::declare(std::string name, std::string_view type, std::vector<int64_t> shape) {
  Impl& impl = *impl_;
  if (impl.file.is_begun()) {
    impl.fail(ErrorCode::kState,
              {.what = "a tensor is declared after the first write", .tensor = std::move(name)});
  }
  if (name.empty() || name.size() > kMaxNameBytes || !io::is_plain_text(name)) {
    impl.fail(ErrorCode::kGgufName, {.what = "the name of a tensor is empty, too long or no plain "
                                             "UTF-8 text",
                                     .found = io::show_name(name),
                                     .limit = fmt::format("{} bytes", kMaxNameBytes)});
  }
  const bool fits = !shape.empty() && shape.size() <= kMaxAxes &&
                    std::ranges::all_of(shape, [](int64_t size) { return size > 0; });
  if (!fits) {
    impl.fail(ErrorCode::kGgufShape, {.what = "the shape cannot be stored",
                                      .tensor = std::move(name),
                                      .expected = "1 to 4 axes, none empty",
                                      .found = fmt::format("[{}]", fmt::join(shape, ", "))});
  }
  std::optional<int64_t> bytes = static_cast<int64_t>(gguf_row_bytes(type, shape.back()));
  for (size_t axis = 0; axis + 1 < shape.size() && bytes; ++axis) {
    bytes = checked_mul(*bytes, shape[axis]);
  }
  const uint64_t offset = impl.aligned(impl.data_end());
  const auto end = bytes ? checked_add(static_cast<int64_t>(offset), *bytes) : std::nullopt;
  if (!end || *end > INT64_MAX - static_cast<int64_t>(kMaxAlignment)) {
    impl.fail(ErrorCode::kGgufSizeOverflow,
              {.what = "the file would be too large", .tensor = std::move(name)});
  }
  if (!impl.names.insert(name).second) {
    impl.fail(ErrorCode::kGgufDuplicateTensor,
              {.what = "the name is already taken", .tensor = std::move(name)});
  }
  impl.tensors.push_back({.name = std::move(name),
                          .type = &type_of(type),
                          .shape = std::move(shape),
                          .offset = offset,
                          .bytes = static_cast<uint64_t>(*bytes)});
}

void GgufWriter::write(std::span<const std::byte> bytes) {
  Impl& impl = *impl_;
  if (impl.is_finished) impl.fail(ErrorCode::kState, {.what = "the file is finished"});
  impl.begin();
  while (!bytes.empty()) {
    if (impl.current == impl.tensors.size()) {
      impl.fail(ErrorCode::kInvalidArgument,
                {.what = "more data is written than was declared",
                 .limit = fmt::format("{} tensors", impl.tensors.size())});
    }
    bytes = impl.write_some(bytes);
  }
}

void GgufWriter::finish() {
  Impl& impl = *impl_;
  if (impl.is_finished) impl.fail(ErrorCode::kState, {.what = "the file is finished"});
  if (impl.current != impl.tensors.size()) {
    impl.fail(ErrorCode::kState, {.what = "less data was written than was declared",
                                  .expected = fmt::format("{} tensors", impl.tensors.size()),
                                  .found = fmt::format("{} of them", impl.current)});
  }
  impl.begin();
  impl.pad_to(impl.aligned(impl.data_end()));
  impl.file.publish();
  impl.is_finished = true;
}

void GgufWriter::finish_with_zeros() {
  Impl& impl = *impl_;
  if (impl.is_finished) impl.fail(ErrorCode::kState, {.what = "the file is finished"});
  impl.begin();
  impl.file.resize(impl.header().size() + impl.aligned(impl.data_end()));
  impl.file.publish();
  impl.is_finished = true;
}

}  // namespace conclave::inline v0
