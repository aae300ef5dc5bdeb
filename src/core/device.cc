#include "core/device.h"

#include "conclave/error.h"

#include <charconv>

namespace conclave::inline v0 {
namespace {

constexpr std::string_view kCpuName = "cpu";
constexpr std::string_view kCudaName = "cuda";

[[noreturn]] void refuse(std::string_view text) {
  throw Error(
      ErrorCode::kUnknownName,
      {.what = "no such device", .expected = "cpu, cuda, or cuda:N", .found = std::string(text)});
}

}  // namespace

Device parse_device(std::string_view text) {
  if (text.empty() || text == kCpuName) return {};
  if (!text.starts_with(kCudaName)) refuse(text);
  Device device{.kind = DeviceKind::kCuda};
  const std::string_view rest = text.substr(kCudaName.size());
  if (rest.empty()) return device;
  const char* const end = rest.data() + rest.size();
  const auto [last, error] = std::from_chars(rest.data() + 1, end, device.ordinal);
  const bool whole = rest[0] == ':' && error == std::errc() && last == end && device.ordinal >= 0;
  if (!whole) refuse(text);
  return device;
}

std::string to_string(const Device& device) {
  if (device.kind == DeviceKind::kCpu) return std::string(kCpuName);
  return std::string(kCudaName) + ":" + std::to_string(device.ordinal);
}

}  // namespace conclave::inline v0
