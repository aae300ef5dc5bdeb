// Verdicts on the rows of a table of alternatives, as a plan lists them.
#pragma once

#include "core/catalog.h"

#include "conclave/error.h"
#include "conclave/layer.h"

#include <ranges>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

// The choice is from the table of this name; a forced name excludes all other rows.
struct TableChoice {
  const char* table;
  std::string forced = {};
  std::string_view why = "first row that fits";  // the reason of the row that is taken
};

// The verdict on one row. One that does not fit has the support's reason, whatever `reason` says.
PlanRow verdict_on(const char* table, std::string_view name, const Support& fits, bool chosen,
                   std::string reason);

// Adds the verdicts on rows that do not fit or are not the forced one; returns the others, whose
// verdicts the caller adds by `settle`.
template <class Rows, class Fits>
auto list_fitting(Rows rows, const TableChoice& choice, const Fits& fits,
                  std::vector<PlanRow>& verdicts) {
  std::vector<const std::ranges::range_value_t<Rows>*> fitting;
  for (const auto& row : rows) {
    Support support = fits(row);
    if (support && !choice.forced.empty() && row.name != choice.forced) {
      support = Support::no("LayerOptions ask for " + choice.forced);
    }
    if (support) fitting.push_back(&row);
    verdicts.push_back(verdict_on(choice.table, row.name, support, false, {}));
  }
  return fitting;
}

// Gives the verdict on a row that fits.
void settle(std::vector<PlanRow>& verdicts, const char* table, std::string_view name, bool chosen,
            std::string reason);

// Settles all: the first row that fits is taken. Null if none is left.
template <class Row>
const Row* settle_first(const std::vector<const Row*>& fitting, const TableChoice& choice,
                        std::vector<PlanRow>& verdicts) {
  for (const Row* row : fitting) {
    const bool first = row == fitting.front();
    settle(verdicts, choice.table, row->name, first,
           first ? std::string(choice.forced.empty() ? choice.why : "asked for by name")
                 : std::string(fitting.front()->name) + " comes first");
  }
  return fitting.empty() ? nullptr : fitting.front();
}

// Takes the first row of the catalog that supports `problem`; null if none does. Every row gets its
// verdict. Throws Error(kUnknownName) for a forced name that the catalog lacks.
template <class Row, class Problem>
const Row* choose_first(const Catalog<Row>& catalog, const TableChoice& choice,
                        const Problem& problem, std::vector<PlanRow>& verdicts) {
  if (!choice.forced.empty()) static_cast<void>(catalog.find(choice.forced, choice.table));
  const auto supports = [&](const Row& row) { return row.supports(problem); };
  return settle_first(list_fitting(catalog.rows(), choice, supports, verdicts), choice, verdicts);
}

// Throws Error(kUnsupported) with the reasons of all rows of the table.
[[noreturn]] void throw_no_row(const char* table, const std::vector<PlanRow>& verdicts);

}  // namespace conclave::inline v0
