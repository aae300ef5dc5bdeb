#include "conclave/layer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>

namespace conclave::inline v0 {
namespace {

// 0 B, 12.3 KiB, 1.21 GiB
std::string format_bytes(size_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < std::size(kUnits)) {
    value /= 1024.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

}  // namespace

std::string explain(const Plan& plan) {
  std::string text;
  const auto line = [&text](const char* label, const std::string& value) {
    text += fmt::format("{:<15}{}\n", label, value.empty() ? "none fits" : value);
  };
  line("isa", plan.isa);
  line("arithmetic", plan.arithmetic);
  line("determinism", plan.determinism);
  line("router", plan.router);
  line("dispatcher", plan.dispatcher);
  line("tile", plan.tile);
  line("stages", fmt::format("{}", fmt::join(plan.stages, " > ")));
  line("packed layout", plan.packed_layout);
  line("packed bytes", format_bytes(plan.packed_bytes));
  line("workspace",
       fmt::format("{} for {} tokens", format_bytes(plan.workspace_bytes), plan.max_tokens));
  line("part", plan.part);
  size_t table_width = 0;
  size_t name_width = 0;
  for (const PlanRow& row : plan.rows) {
    table_width = std::max(table_width, row.table.size());
    name_width = std::max(name_width, row.name.size());
  }
  for (const PlanRow& row : plan.rows) {
    text += fmt::format("{:<{}}  {:<{}}  {:<8}  {}\n", row.table, table_width, row.name, name_width,
                        row.chosen ? "chosen" : "rejected", row.reason);
  }
  return text;
}

}  // namespace conclave::inline v0
