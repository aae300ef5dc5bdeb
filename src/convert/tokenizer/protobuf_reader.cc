#include "convert/tokenizer/protobuf_reader.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <bit>
#include <utility>

namespace conclave::inline v0::conversion {
namespace {

enum WireType : uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

}  // namespace

void ProtobufReader::fail(std::string what, size_t offset) const {
  throw Error(ErrorCode::kTokenizerModel, {.what = std::move(what),
                                           .file = std::string(file_),
                                           .expected = "a model of SentencePiece",
                                           .found = fmt::format("at byte {}", offset)});
}

std::string_view ProtobufReader::take(uint64_t size) {
  if (size > bytes_.size() - at_) fail("a field ends behind its message", begin_ + at_);
  const std::string_view taken = bytes_.substr(at_, static_cast<size_t>(size));
  at_ += taken.size();
  return taken;
}

uint64_t ProtobufReader::varint() {
  const size_t offset = begin_ + at_;
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    const auto byte = static_cast<uint8_t>(take(1).front());
    if (shift == 63 && byte > 1) break;
    value |= uint64_t{byte & 0x7Fu} << shift;
    if (byte < 0x80) return value;
  }
  fail("a number has more than 64 bits", offset);
}

uint64_t ProtobufReader::fixed(size_t size) {
  uint64_t value = 0;
  int shift = 0;
  for (const char byte : take(size)) {
    value |= uint64_t{static_cast<uint8_t>(byte)} << shift;
    shift += 8;
  }
  return value;
}

ProtobufField ProtobufReader::next() {
  ProtobufField field{.offset = begin_ + at_};
  const uint64_t tag = varint();
  field.type = static_cast<uint8_t>(tag & 7);
  constexpr uint64_t kLargestNumber = (uint64_t{1} << 29) - 1;
  if (tag >> 3 == 0 || tag >> 3 > kLargestNumber) fail("a field has no number", field.offset);
  field.number = static_cast<uint32_t>(tag >> 3);
  switch (field.type) {
    case kVarint:
      field.value = varint();
      return field;
    case kFixed64:
      field.value = fixed(8);
      return field;
    case kFixed32:
      field.value = fixed(4);
      return field;
    case kBytes:
      field.bytes = take(varint());
      return field;
    default:
      fail("a field is of no known type", field.offset);
  }
}

void ProtobufReader::require(const ProtobufField& field, uint8_t type) const {
  if (field.type == type) return;
  fail(fmt::format("field {} is of another type", field.number), field.offset);
}

std::string_view ProtobufReader::bytes_of(const ProtobufField& field) const {
  require(field, kBytes);
  return field.bytes;
}

int32_t ProtobufReader::int_of(const ProtobufField& field) const {
  require(field, kVarint);
  return static_cast<int32_t>(static_cast<uint32_t>(field.value));
}

bool ProtobufReader::bool_of(const ProtobufField& field) const {
  require(field, kVarint);
  return field.value != 0;
}

float ProtobufReader::float_of(const ProtobufField& field) const {
  require(field, kFixed32);
  return std::bit_cast<float>(static_cast<uint32_t>(field.value));
}

ProtobufReader ProtobufReader::message_of(const ProtobufField& field) const {
  const std::string_view bytes = bytes_of(field);
  return {bytes, file_, begin_ + static_cast<size_t>(bytes.data() - bytes_.data())};
}

}  // namespace conclave::inline v0::conversion
