#include "checkpoint/gguf/fed_header.h"

#include "io/text.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr const char* kCountKey = "split.count";
constexpr const char* kTensorsKey = "split.tensors.count";

io::GgufHeader parse(std::span<const std::byte> bytes, const std::string& name) {
  try {
    return io::parse_gguf_header(bytes, name);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kGgufTruncatedHeader) throw;
    ErrorDetail detail = error.detail();
    detail.hint = "give more of the file's first bytes: all keys and tensors that the header has";
    throw Error(error.code(), std::move(detail));
  }
}

[[noreturn]] void fail(const std::string& name, const char* key, ErrorDetail detail) {
  detail.file = name;
  detail.tensor = key;
  throw Error(ErrorCode::kGgufSplit, std::move(detail));
}

std::optional<uint64_t> number_of(const io::GgufHeader& header, const std::string& name,
                                  const char* key) {
  const io::GgufValue* const value = header.find_value(key);
  if (value == nullptr) return std::nullopt;
  if (const auto* number = std::get_if<uint64_t>(value)) return *number;
  if (const auto* number = std::get_if<int64_t>(value); number != nullptr && *number >= 0) {
    return static_cast<uint64_t>(*number);
  }
  fail(name, key,
       {.what = "the key is no count",
        .expected = "an integer of at least 0",
        .found = "a value of another type"});
}

void check_names(const std::vector<io::GgufTensor>& tensors) {
  std::set<std::string_view> names;
  for (const io::GgufTensor& tensor : tensors) {
    if (names.insert(tensor.name).second) continue;
    throw Error(ErrorCode::kGgufDuplicateTensor, {.what = "two parts list the tensor",
                                                  .file = kGgufHeaderName,
                                                  .tensor = io::show_name(tensor.name),
                                                  .expected = "every tensor in one part"});
  }
}

}  // namespace

FedHeader read_fed_header(std::span<const std::byte> first,
                          std::span<const std::span<const std::byte>> other_parts) {
  FedHeader header{.first = parse(first, kGgufHeaderName), .listed = {}};
  const uint64_t parts = number_of(header.first, kGgufHeaderName, kCountKey).value_or(1);
  const uint64_t given = other_parts.size() + 1;
  if (given > std::max<uint64_t>(parts, 1)) {
    fail(kGgufHeaderName, kCountKey,
         {.what = "there are more headers than the model has parts",
          .expected = fmt::format("{} parts", parts),
          .found = fmt::format("{} headers", given)});
  }
  header.listed = header.first.tensors;
  for (size_t i = 0; i < other_parts.size(); ++i) {
    const std::string name = fmt::format("{} {}", kGgufHeaderName, i + 2);
    io::GgufHeader other = parse(other_parts[i], name);
    const std::optional<uint64_t> count = number_of(other, name, kCountKey);
    if (count != parts) {
      fail(name, kCountKey,
           {.what = "the header is none of a part of the same model",
            .expected = std::to_string(parts),
            .found = count ? std::to_string(*count) : "no such key"});
    }
    std::ranges::move(other.tensors, std::back_inserter(header.listed));
  }
  check_names(header.listed);
  if (header.listed.empty() || given < parts) return header;
  const auto tensors = number_of(header.first, kGgufHeaderName, kTensorsKey);
  if (tensors && *tensors != header.listed.size()) {
    fail(kGgufHeaderName, kTensorsKey,
         {.what = "the headers do not list all tensors of the model",
          .expected = std::to_string(*tensors),
          .found = std::to_string(header.listed.size())});
  }
  header.list = GgufTensorList::kWhole;
  return header;
}

}  // namespace conclave::inline v0::checkpoint
