#include "conclave/layer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>

namespace conclave::inline v0 {
namespace {

// Formats a size: 0 B, 12.3 KiB, 1.21 GiB.
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

// One line per rung: "tokens 17 to 64", the kernel and tile that serve them, why, and the memory
// they need.
void append_ladder(const Plan& plan, std::string& text) {
  size_t range_width = 0;
  size_t kernel_width = 0;
  size_t tile_width = 0;
  const auto range = [](const PlanRung& rung) {
    if (rung.first_tokens == rung.last_tokens) return fmt::format("{}", rung.last_tokens);
    return fmt::format("{} to {}", rung.first_tokens, rung.last_tokens);
  };
  for (const PlanRung& rung : plan.ladder) {
    range_width = std::max(range_width, range(rung).size());
    kernel_width = std::max(kernel_width, rung.kernel.size());
    tile_width = std::max(tile_width, rung.tile.size());
  }
  for (const PlanRung& rung : plan.ladder) {
    text += fmt::format("{:<15}{:<{}}  {:<{}}  {:<{}}  {:>10}  {}\n",
                        &rung == plan.ladder.data() ? "tokens" : "", range(rung), range_width,
                        rung.kernel, kernel_width, rung.tile, tile_width,
                        format_bytes(rung.workspace_bytes), rung.reason);
  }
}

// One line per buffer of the workspace: its bytes, and the stages between which it lives.
void append_buffers(const Plan& plan, std::string& text) {
  size_t name_width = 0;
  for (const PlanBuffer& buffer : plan.buffers) {
    name_width = std::max(name_width, buffer.name.size());
  }
  for (const PlanBuffer& buffer : plan.buffers) {
    std::string life = buffer.first_stage;
    if (buffer.last_stage != life) life += " > " + buffer.last_stage;
    text +=
        fmt::format("{:<15}{:<{}}  {:>10}  {}\n", &buffer == plan.buffers.data() ? "buffers" : "",
                    buffer.name, name_width, format_bytes(buffer.bytes), life);
  }
}

}  // namespace

std::string explain(const Plan& plan) {
  std::string text;
  const auto line = [&text](const char* label, const std::string& value) {
    text += fmt::format("{:<15}{}\n", label, value.empty() ? "none fits" : value);
  };
  line("device", plan.device);
  if (!plan.isa.empty()) line("isa", plan.isa);
  line("arithmetic", plan.arithmetic);
  line("determinism", plan.determinism);
  line("router", plan.router);
  line("dispatcher", plan.dispatcher);
  line("tile", plan.tile);
  line("stages", fmt::format("{}", fmt::join(plan.stages, " > ")));
  line("packed layout", plan.packed_layout);
  line("packed bytes", format_bytes(plan.packed_bytes));
  if (plan.in_place_bytes != 0) line("in place", format_bytes(plan.in_place_bytes));
  line("workspace",
       fmt::format("{} for {} tokens", format_bytes(plan.workspace_bytes), plan.max_tokens));
  line("part", plan.part);
  append_buffers(plan, text);
  append_ladder(plan, text);
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
