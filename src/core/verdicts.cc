#include "core/verdicts.h"

#include <utility>

namespace conclave::inline v0 {

PlanRow verdict_on(const char* table, std::string_view name, const Support& fits, bool chosen,
                   std::string reason) {
  return {.table = table,
          .name = std::string(name),
          .chosen = fits && chosen,
          .reason = fits ? std::move(reason) : fits.reason()};
}

void settle(std::vector<PlanRow>& verdicts, const char* table, std::string_view name, bool chosen,
            std::string reason) {
  for (PlanRow& verdict : verdicts) {
    if (verdict.table != table || verdict.name != name) continue;
    verdict.chosen = chosen;
    verdict.reason = std::move(reason);
    return;
  }
}

void throw_no_row(const char* table, const std::vector<PlanRow>& verdicts) {
  std::string reasons;
  for (const PlanRow& verdict : verdicts) {
    if (verdict.table != table) continue;
    reasons += (reasons.empty() ? "" : "; ") + verdict.name + ": " + verdict.reason;
  }
  throw Error(ErrorCode::kUnsupported,
              {.what = std::string("no ") + table + " can run this layer", .found = reasons});
}

}  // namespace conclave::inline v0
