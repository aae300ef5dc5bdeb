// Rows of recorded routing: checks of what callers give and what files hold, and the row of a
// token.
#pragma once

#include "conclave/routing_record.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::record {

// Throws Error(kInvalidArgument) for numbers that describe no layer.
void check_layer(const RecordedLayer& layer);
// Throws Error(kInvalidArgument) for layers that do not ascend, kShape for lengths that disagree.
void check_record(const RoutingRecord& record);
// Checks a matrix [rows, slots] of an argument.
void check_argument(std::string_view name, const ConstTensorView& tensor, int64_t rows,
                    int64_t slots, std::initializer_list<DType> types);
// The layers of a record, for messages: "3, 4, 5".
std::string layers_text(const std::vector<int64_t>& layers);
// Checks what a recorder is made for; returns the layers in ascending order. Throws
// Error(kInvalidArgument).
std::vector<RecordedLayer> layers_to_record(std::span<const RecordedLayer> layers,
                                            int64_t capacity);
[[noreturn]] void refuse_layer(int64_t layer, const std::vector<int64_t>& recorded);

// The ring of a layer, of pointers to rings by layer. Throws Error(kInvalidArgument) for none.
template <class Rings>
auto& ring_of(const Rings& rings, int64_t layer) {
  const auto number = [](const auto& ring) { return ring->layer().layer; };
  const auto found = std::ranges::lower_bound(rings, layer, {}, number);
  if (found != rings.end() && number(*found) == layer) return **found;
  std::vector<int64_t> layers;
  for (const auto& ring : rings) layers.push_back(number(ring));
  refuse_layer(layer, layers);
}

// Rows of a layer by token. Of a token's rows the last one counts.
class TokenIndex {
 public:
  explicit TokenIndex(const RecordedRows& rows);
  // -1 for a token that has no row.
  int64_t row_of(const TokenKey& token) const noexcept;
  // Each token once, ascending.
  std::vector<TokenKey> tokens() const;

 private:
  const RecordedRows* rows_;
  std::vector<int64_t> order_;  // rows by token, of equal tokens by row
};

}  // namespace conclave::inline v0::record
