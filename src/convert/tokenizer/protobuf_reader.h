// Walks the fields of a protobuf message within its bytes. Nothing that a message claims about
// itself decides how much is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace conclave::inline v0::conversion {

struct ProtobufField {
  uint32_t number = 0;
  uint8_t type = 0;             // the encoding's own numbers: 0 varint, 1 and 5 fixed, 2 bytes
  uint64_t value = 0;           // a varint, or the bits of a fixed number
  std::string_view bytes = {};  // within the message
  size_t offset = 0;            // where the field begins in the file
};

class ProtobufReader {
 public:
  // `bytes` begin at `offset` of the file, which errors name. Both texts must outlive the reader.
  ProtobufReader(std::string_view bytes, std::string_view file, size_t offset = 0)
      : bytes_(bytes), file_(file), begin_(offset) {}

  bool at_end() const { return at_ == bytes_.size(); }
  // Throws Error(kTokenizerModel) for a field that ends behind the message or has no known type.
  ProtobufField next();

  // The value of a field of a declared type. Throw Error(kTokenizerModel) for another one.
  std::string_view bytes_of(const ProtobufField& field) const;
  int32_t int_of(const ProtobufField& field) const;
  bool bool_of(const ProtobufField& field) const;
  float float_of(const ProtobufField& field) const;
  // The fields of a message within this one.
  ProtobufReader message_of(const ProtobufField& field) const;

  [[noreturn]] void fail(std::string what, size_t offset) const;

 private:
  uint64_t varint();
  uint64_t fixed(size_t size);
  std::string_view take(uint64_t size);
  void require(const ProtobufField& field, uint8_t type) const;

  std::string_view bytes_;
  std::string_view file_;
  size_t begin_;
  size_t at_ = 0;
};

}  // namespace conclave::inline v0::conversion
