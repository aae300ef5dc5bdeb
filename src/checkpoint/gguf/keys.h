// Typed, bounded access to the keys of one architecture in a GGUF file: every value out of range,
// of the wrong type or absent is an Error that names file, key, value and limit.
#pragma once

#include "checkpoint/config_reader.h"
#include "io/gguf/header.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace conclave::inline v0::checkpoint {

class GgufKeys {
 public:
  // Keys are read as "ARCHITECTURE.key". The header must outlive it; errors name `file`.
  GgufKeys(const io::GgufHeader& header, std::string file);

  const std::string& architecture() const noexcept { return architecture_; }
  bool has(std::string_view key) const { return find(key) != nullptr; }
  // The value, or that of a layer if it is an array; `otherwise` if there is no such key. Throws
  // Error(kConfigMissingKey) if both lack, Error(kConfigValue).
  int64_t size(std::string_view key, std::optional<int64_t> otherwise, const SizeRange& range,
               int64_t layer = 0) const;
  // A finite number from 0 to 1e30.
  double number(std::string_view key, double otherwise, int64_t layer = 0) const;
  bool flag(std::string_view key, bool otherwise) const;
  // Throws an Error that names the file and the key.
  [[noreturn]] void reject(ErrorCode code, std::string_view key, ErrorDetail detail) const;

 private:
  const io::GgufValue* find(std::string_view key) const;
  // Nothing if the key is absent.
  std::optional<double> entry(std::string_view key, int64_t layer) const;

  const io::GgufHeader& header_;
  std::string file_;
  std::string architecture_;
};

}  // namespace conclave::inline v0::checkpoint
