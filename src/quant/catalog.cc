#include "quant/code_rows.h"
#include "quant/formats.h"
#include "quant/plain_codec.h"

#include <algorithm>
#include <array>

namespace conclave::inline v0::quant {
namespace {

template <class... Plain, class... Coded>
constexpr auto rows_of(FormatList<Plain...>, FormatList<Coded...>) {
  return std::array{plain_row<Plain>()..., coded_row<Coded>()...};
}
constexpr auto kFormats = rows_of(PlainFormats{}, CodedFormats{});
constexpr auto kPanelFormats = rows_of(PlainFormats{}, PanelFormats{});
constexpr auto kKnownFormats = rows_of(PlainFormats{}, joined(PanelFormats{}, NarrowFormats{}));

}  // namespace

Catalog<WeightFormat> format_catalog() { return Catalog<WeightFormat>(kFormats); }
Catalog<WeightFormat> panel_catalog() { return Catalog<WeightFormat>(kPanelFormats); }

const WeightFormat* find_known_format(DType element) noexcept {
  const auto found = std::ranges::find(kKnownFormats, element, &WeightFormat::element);
  return found == kKnownFormats.end() ? nullptr : &*found;
}

}  // namespace conclave::inline v0::quant
