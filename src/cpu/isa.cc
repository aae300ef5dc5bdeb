#include "cpu/isa.h"

#include "cpu/cpuid.h"

#include <array>
#include <cerrno>
#include <sys/syscall.h>
#include <system_error>
#include <unistd.h>

namespace conclave::inline v0::cpu {
namespace {

template <class Value>
struct Named {
  std::string_view name;
  Value value;
};

constexpr std::array kIsas = {
    Named<Isa>{"scalar", Isa::kScalar},          Named<Isa>{"avx2", Isa::kAvx2},
    Named<Isa>{"avx512", Isa::kAvx512},          Named<Isa>{"avx512_vnni", Isa::kAvx512Vnni},
    Named<Isa>{"avx512_bf16", Isa::kAvx512Bf16}, Named<Isa>{"amx", Isa::kAmx},
};

constexpr Named<Arithmetic> named(Arithmetic arithmetic) {
  return {to_string(arithmetic), arithmetic};
}
constexpr std::array kArithmetics = {named(Arithmetic::kF32Fma), named(Arithmetic::kDpBf16),
                                     named(Arithmetic::kAmxBf16), named(Arithmetic::kInt8Dot)};

template <class Table, class Value>
std::string_view name_of(const Table& table, Value value) {
  for (const auto& row : table) {
    if (row.value == value) return row.name;
  }
  return "unknown";
}

template <class Table>
auto value_of(const Table& table, std::string_view name, std::string_view kind) {
  std::string known;
  for (const auto& row : table) {
    if (row.name == name) return row.value;
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  throw Error(ErrorCode::kUnknownName, {.what = "no " + std::string(kind) + " of this name",
                                        .expected = "one of " + known,
                                        .found = std::string(name)});
}

Support detect(Isa isa) {
  Support support = offered(cpuid_words(), isa);
  return support && isa == Isa::kAmx ? request_tiles() : support;
}

}  // namespace

Support request_tiles() {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kXfeatureXtileData = 18;
  if (syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtileData) == 0) return Support::yes();
  return Support::no("Linux refused the AMX tile permission (arch_prctl: " +
                     std::system_category().message(errno) + ")");
}

std::string_view to_string(Isa isa) noexcept { return name_of(kIsas, isa); }
Isa parse_isa(std::string_view name) { return value_of(kIsas, name, "instruction set"); }
Arithmetic parse_arithmetic(std::string_view name) {
  return value_of(kArithmetics, name, "arithmetic");
}

Support usable(Isa isa) {
  static const std::array<Support, kIsas.size()> supports = {
      detect(Isa::kScalar),     detect(Isa::kAvx2),       detect(Isa::kAvx512),
      detect(Isa::kAvx512Vnni), detect(Isa::kAvx512Bf16), detect(Isa::kAmx)};
  return supports[static_cast<size_t>(isa)];
}

Isa best_isa() {
  for (auto row = kIsas.rbegin(); row != kIsas.rend(); ++row) {
    if (usable(row->value)) return row->value;
  }
  return Isa::kScalar;
}

bool permutes_bytes() { return static_cast<bool>(offers_byte_permutes(cpuid_words())); }

bool has_avx_vnni() { return static_cast<bool>(offers_avx_vnni(cpuid_words())); }

CpuId cpu_id() {
  const CpuIdentity& identity = cpu_identity();
  return {.vendor = identity.vendor, .family = identity.family, .model = identity.model};
}

}  // namespace conclave::inline v0::cpu
