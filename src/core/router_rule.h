// The built-in routers as values, so that nothing below the catalog compares names.
#pragma once

#include <cstdint>
#include <string_view>

namespace conclave::inline v0 {

enum class RouterRule : uint8_t {
  kTopk,
  kHash,
  kSparseMixer,
  kSinkSoftmax,
  kSimulated,
  kCustom,  // any other name: a router of the application, or an unknown one
};

// Maps RouterSpec::name. A name that is kCustom and not in the context fails in Catalog::find.
RouterRule router_rule(std::string_view name) noexcept;

}  // namespace conclave::inline v0
