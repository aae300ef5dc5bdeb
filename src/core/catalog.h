// An ordered table of alternatives. A row is taken by its name, or chosen among those that support
// the problem: the first, or the one of least cost. Host and device kernels of experts end with a
// plain reference; a table without such a row may have none that fits.
#pragma once

#include "conclave/error.h"

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

// `Row` has a `name` (std::string_view) and, for choose_first, `Support supports(const Problem&)`.
template <class Row>
class Catalog {
 public:
  constexpr explicit Catalog(std::span<const Row> rows) : rows_(rows) {}

  std::span<const Row> rows() const { return rows_; }

  // Throws Error(kUnknownName) listing the known names.
  const Row& find(std::string_view name, std::string_view table) const {
    std::string known;
    for (const Row& row : rows_) {
      if (row.name == name) return row;
      known += (known.empty() ? "" : ", ") + std::string(row.name);
    }
    throw Error(ErrorCode::kUnknownName, {.what = "no " + std::string(table) + " of this name",
                                          .expected = "one of " + known,
                                          .found = std::string(name)});
  }

 private:
  std::span<const Row> rows_;
};

}  // namespace conclave::inline v0
