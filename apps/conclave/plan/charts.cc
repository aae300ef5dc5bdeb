#include "plan/charts.h"

#include "output/drawing.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace conclave::tool {
namespace {

using drawing::dot;
using drawing::line;
using drawing::rect;
using drawing::svg;
using drawing::text;

constexpr double kRight = 56;  // room for a number behind a row

// Loads between two limits have one colour; the last has no upper limit.
struct Shade {
  double from = 0;
  std::string_view colour;
  double opacity = 0;
};
constexpr std::array kShades = {
    Shade{0, "main", 0.95},    Shade{0.25, "main", 0.7},  Shade{0.5, "main", 0.42},
    Shade{0.75, "main", 0.2},  Shade{0.9, "rest", 0.18},  Shade{1.1, "worst", 0.16},
    Shade{1.35, "worst", 0.3}, Shade{1.7, "worst", 0.46}, Shade{2.2, "worst", 0.64},
    Shade{3, "worst", 0.82},   Shade{4, "worst", 1}};

size_t shade_of(double load) {
  size_t shade = 0;
  while (shade + 1 < kShades.size() && load >= kShades[shade + 1].from) ++shade;
  return shade;
}

std::string range_text(size_t shade) {
  const double from = kShades[shade].from;
  if (shade + 1 == kShades.size()) return fmt::format("{:g} times the mean or more", from);
  return fmt::format("{:g} to {:g} times the mean", from, kShades[shade + 1].from);
}

std::string attributes(const Shade& shade) {
  return fmt::format("class=\"{}\" fill-opacity=\"{:.2f}\"", shade.colour, shade.opacity);
}

std::string shade_key(double left, double y) {
  constexpr double kStep = 34;
  std::string out;
  for (size_t i = 0; i < kShades.size(); ++i) {
    const double x = left + kStep * static_cast<double>(i);
    out += rect(x, y, kStep, 12, attributes(kShades[i]), range_text(i));
    if (i > 0) out += text(x, y + 26, "tick middle", fmt::format("{:g}", kShades[i].from));
  }
  return out + text(left + kStep * static_cast<double>(kShades.size()) + 8, y + 11, "tick",
                    "times the mean of the layer");
}

// Numbers under as many columns as have room.
std::string column_numbers(double left, double width, double y, std::string_view subject,
                           int64_t columns) {
  const double each = width / static_cast<double>(columns);
  int64_t every = 1;
  for (int64_t step = 1; static_cast<double>(every) * each < 34; step *= 2) every = step;
  std::string out = text(left - 10, y, "tick end", subject);
  for (int64_t i = 0; i < columns; i += every) {
    out += text(left + each * (static_cast<double>(i) + 0.5), y, "tick middle", std::to_string(i));
  }
  return out;
}

// Room for the longest name of a strategy, in letters of about 6.6 units.
double names_width(const std::vector<const StrategyPlan*>& rows) {
  size_t longest = 8;
  for (const StrategyPlan* row : rows) longest = std::max(longest, row->strategy.name().size());
  return 20 + 6.6 * static_cast<double>(longest);
}

constexpr double kBarRow = 26;

}  // namespace

std::string load_map(const std::vector<std::vector<double>>& loads,
                     const std::vector<int64_t>& layers, std::string_view subject,
                     int64_t columns) {
  constexpr double kLeft = 64;
  constexpr double kPlotWidth = drawing::kWidth - kLeft - kRight;
  const size_t fields = loads.empty() ? 0 : loads.front().size();
  if (fields == 0) return {};
  const double height = std::clamp(420.0 / static_cast<double>(loads.size()), 5.0, 22.0);
  const double width = kPlotWidth / static_cast<double>(fields);
  // One path for each shade keeps the page small: a model has ten thousands of fields.
  std::array<std::string, kShades.size()> paths;
  std::string names;
  const auto every = static_cast<size_t>(std::ceil(13 / height));
  for (size_t row = 0; row < loads.size(); ++row) {
    const double y = height * static_cast<double>(row);
    for (size_t field = 0; field < fields; ++field) {
      paths[shade_of(loads[row][field])] += fmt::format(
          "M{:.2f} {:.1f}h{:.2f}v{:.1f}h-{:.2f}z", kLeft + width * static_cast<double>(field), y,
          width, height - (height > 8 ? 1 : 0), width);
    }
    if (row % every != 0) continue;
    const double middle = y + height / 2 + 4;
    names += text(kLeft - 10, middle, "tick end", std::to_string(layers[row]));
    names += text(kLeft + kPlotWidth + 6, middle, "tick",
                  fmt::format("{:.2f}", std::ranges::max(loads[row])));
  }
  std::string content;
  for (size_t shade = 0; shade < kShades.size(); ++shade) {
    if (paths[shade].empty()) continue;
    content += fmt::format("<path {} d=\"{}\"><title>{}</title></path>\n",
                           attributes(kShades[shade]), paths[shade], range_text(shade));
  }
  const double bottom = height * static_cast<double>(loads.size());
  content += names + column_numbers(kLeft, kPlotWidth, bottom + 16, subject, columns) +
             text(kLeft + kPlotWidth + 6, bottom + 16, "tick", "largest") +
             shade_key(kLeft, bottom + 32);
  return svg(bottom + 64, fmt::format("Load of each {} by layer", subject), content);
}

std::string time_chart(const std::vector<const StrategyPlan*>& rows) {
  const double left = names_width(rows);
  double longest = 1;
  for (const StrategyPlan* row : rows) {
    longest = std::max(longest, row->compute_us + row->exchange_us);
  }
  const double scale = (drawing::kWidth - left - 76) / longest;
  std::string content;
  double y = 2;
  for (const StrategyPlan* row : rows) {
    const double compute = row->compute_us * scale;
    const double exchange = row->exchange_us * scale;
    const std::string name = row->strategy.name();
    content += text(left - 10, y + 14, "label end", name) +
               rect(left, y, compute, kBarRow - 8, "class=\"main\"",
                    fmt::format("{}: compute {:.1f} us", name, row->compute_us)) +
               rect(left + compute, y, exchange, kBarRow - 8, "class=\"worst\"",
                    fmt::format("{}: exchange {:.1f} us", name, row->exchange_us)) +
               text(left + compute + exchange + 8, y + 14, "label",
                    fmt::format("{:.0f} us", row->compute_us + row->exchange_us));
    y += kBarRow;
  }
  return svg(y, "Predicted time of a layer", content);
}

std::string balance_chart(const std::vector<const StrategyPlan*>& rows) {
  const double left = names_width(rows);
  const double width = drawing::kWidth - left - 30;
  const double bottom = kBarRow * static_cast<double>(rows.size()) + 4;
  std::string content;
  for (int tenth = 0; tenth <= 10; tenth += 2) {
    const double x = left + width * tenth / 10;
    content += line(x, 0, x, bottom, "grid") +
               text(x, bottom + 16, "tick middle", fmt::format("{:.1f}", tenth / 10.0));
  }
  double y = kBarRow / 2;
  for (const StrategyPlan* row : rows) {
    const auto x = [&](double balance) { return left + width * balance; };
    const std::string name = row->strategy.name();
    const Spread& balance = row->balance;
    content +=
        text(left - 10, y + 4, "label end", name) +
        line(x(balance.worst), y, x(balance.mean), y, "median") +
        dot(x(balance.p95), y, 3, "token",
            fmt::format("{}: 95 % of batches {:.3f} or better", name, balance.p95)) +
        dot(x(balance.worst), y, 3.6, "worst",
            fmt::format("{}: worst batch {:.3f}", name, balance.worst)) +
        dot(x(balance.mean), y, 4.2, "main", fmt::format("{}: mean {:.3f}", name, balance.mean));
    y += kBarRow;
  }
  return svg(bottom + 24, "Balance of ranks", content);
}

}  // namespace conclave::tool
