#include "io/gguf/value.h"

#include "io/safetensors_rules.h"
#include "io/text.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <utility>

namespace conclave::inline v0::io {
namespace {

// These limits are ours: far above any real file, low enough to bound memory.
constexpr uint64_t kMaxStringBytes = uint64_t{16} << 20;
constexpr uint64_t kMaxKeptNumbers = 65'536;

enum class ValueType : uint32_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64,
};

class ValueReader {
 public:
  ValueReader(GgufCursor& cursor, std::string_view key) : cursor_(cursor), key_(key) {}

  GgufValue read() {
    const ValueType type = parse_type();
    if (type == ValueType::kArray) return parse_array();
    return parse_scalar(type);
  }

 private:
  [[noreturn]] void fail(ErrorCode code, ErrorDetail detail) const {
    detail.file = std::string(cursor_.file());
    detail.tensor = show_name(key_);
    throw Error(code, std::move(detail));
  }

  ValueType parse_type() {
    const auto id = cursor_.number<uint32_t>("the type of a value");
    if (id > static_cast<uint32_t>(ValueType::kF64)) {
      fail(ErrorCode::kGgufValueType, {.what = "the type of the key's value is not known",
                                       .expected = "0 to 12",
                                       .found = std::to_string(id)});
    }
    return static_cast<ValueType>(id);
  }

  GgufValue parse_scalar(ValueType type) {
    constexpr const char* kValue = "a value";
    switch (type) {
      case ValueType::kU8:
        return uint64_t{cursor_.number<uint8_t>(kValue)};
      case ValueType::kI8:
        return int64_t{cursor_.number<int8_t>(kValue)};
      case ValueType::kU16:
        return uint64_t{cursor_.number<uint16_t>(kValue)};
      case ValueType::kI16:
        return int64_t{cursor_.number<int16_t>(kValue)};
      case ValueType::kU32:
        return uint64_t{cursor_.number<uint32_t>(kValue)};
      case ValueType::kI32:
        return int64_t{cursor_.number<int32_t>(kValue)};
      case ValueType::kF32:
        return double{cursor_.number<float>(kValue)};
      case ValueType::kBool:
        return parse_bool();
      case ValueType::kString:
        return cursor_.string(kValue, kMaxStringBytes);
      case ValueType::kU64:
        return cursor_.number<uint64_t>(kValue);
      case ValueType::kI64:
        return cursor_.number<int64_t>(kValue);
      case ValueType::kF64:
        return cursor_.number<double>(kValue);
      case ValueType::kArray:
        break;
    }
    fail(ErrorCode::kInternal, {.what = "an array is no scalar"});
  }

  bool parse_bool() {
    const auto byte = cursor_.number<uint8_t>("a value");
    if (byte <= 1) return byte == 1;
    fail(ErrorCode::kGgufBool, {.what = "the key's value is no bool",
                                .expected = "0 or 1",
                                .found = std::to_string(byte)});
  }

  // The format allows arrays of arrays, which no writer makes and which recursion would pay for.
  GgufArray parse_array() {
    const ValueType type = parse_type();
    if (type == ValueType::kArray) {
      fail(ErrorCode::kGgufArray, {.what = "the key's value is an array of arrays",
                                   .expected = "an array of numbers or strings"});
    }
    const auto count = cursor_.number<uint64_t>("the length of an array");
    const uint64_t least = type == ValueType::kString ? 8 : scalar_bytes(type);
    if (count > cursor_.remaining() / least) {
      fail(ErrorCode::kGgufArray, {.what = "the key's array is longer than the file",
                                   .found = fmt::format("{} elements", count),
                                   .limit = std::to_string(cursor_.remaining() / least),
                                   .hint = kDamagedFileHint});
    }
    GgufArray array{.of_numbers = type != ValueType::kString, .count = count};
    if (array.of_numbers && count > kMaxKeptNumbers) {
      cursor_.skip(count * least, "an array");
      return array;
    }
    if (array.of_numbers) array.numbers.reserve(count);
    for (uint64_t i = 0; i < count; ++i) {
      if (array.of_numbers) {
        array.numbers.push_back(to_double(parse_scalar(type)));
      } else {
        cursor_.skip_string("an array of strings", kMaxStringBytes);
      }
    }
    return array;
  }

  static uint64_t scalar_bytes(ValueType type) {
    switch (type) {
      case ValueType::kU8:
      case ValueType::kI8:
      case ValueType::kBool:
        return 1;
      case ValueType::kU16:
      case ValueType::kI16:
        return 2;
      case ValueType::kU32:
      case ValueType::kI32:
      case ValueType::kF32:
        return 4;
      default:
        return 8;
    }
  }

  static double to_double(const GgufValue& value) {
    if (const auto* number = std::get_if<uint64_t>(&value)) return static_cast<double>(*number);
    if (const auto* number = std::get_if<int64_t>(&value)) return static_cast<double>(*number);
    if (const auto* flag = std::get_if<bool>(&value)) return *flag ? 1 : 0;
    return std::get<double>(value);
  }

  GgufCursor& cursor_;
  std::string_view key_;
};

}  // namespace

GgufValue read_gguf_value(GgufCursor& cursor, std::string_view key) {
  return ValueReader(cursor, key).read();
}

}  // namespace conclave::inline v0::io
