#include "convert/charts.h"

#include "convert/report.h"
#include "output/drawing.h"
#include "output/numbers.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <vector>

namespace conclave::tool {
namespace {

using drawing::dot;
using drawing::line;
using drawing::rect;
using drawing::svg;
using drawing::text;

constexpr double kLeft = 96;  // room for what stands before an axis
constexpr double kPlotWidth = drawing::kWidth - kLeft - 16;

// A logarithmic axis between round numbers, upwards on the screen.
class LogAxis {
 public:
  LogAxis(double lowest, double highest, double top, double bottom) : top_(top), bottom_(bottom) {
    low_ = step_below(lowest);
    high_ = std::max(step_above(highest), low_ * 1.5);
  }

  double y(double value) const {
    const double share = std::log(std::clamp(value, low_, high_) / low_) / std::log(high_ / low_);
    return bottom_ - share * (bottom_ - top_);
  }

  // Round numbers to mark: fewer in each decade, the more decades there are.
  std::vector<double> marks() const {
    const double range = high_ / low_;
    std::vector<double> values;
    for (double decade = decade_of(low_); decade <= high_ * 1.001; decade *= 10) {
      for (const double digit : kRound) {
        const bool shown = digit == 1 || range < 12 || (range < 200 && (digit == 2 || digit == 5));
        const double value = digit * decade;
        const bool inside = value >= low_ * 0.999 && value <= high_ * 1.001;
        if (inside && shown) values.push_back(value);
      }
    }
    return values;
  }

 private:
  static constexpr std::array kRound = {1.0, 1.5, 2.0, 3.0, 5.0, 7.0};

  static double decade_of(double value) {
    return std::pow(10, std::floor(std::log10(value) + 1e-9));
  }
  static double step_below(double value) {
    double step = decade_of(value);
    for (const double digit : kRound) {
      if (digit * decade_of(value) <= value) step = digit * decade_of(value);
    }
    return step;
  }
  static double step_above(double value) {
    for (const double digit : kRound) {
      if (digit * decade_of(value) >= value) return digit * decade_of(value);
    }
    return 10 * decade_of(value);
  }

  double top_;
  double bottom_;
  double low_;
  double high_;
};

// Places of layers in equal columns, with numbers below as many as have room.
class Columns {
 public:
  explicit Columns(std::vector<int64_t> layers) : layers_(std::move(layers)) {
    width_ = std::min(kPlotWidth / static_cast<double>(std::max<size_t>(layers_.size(), 1)), 72.0);
  }

  double width() const { return width_; }
  double end() const { return kLeft + width_ * static_cast<double>(layers_.size()); }
  double middle(size_t index) const { return kLeft + width_ * (static_cast<double>(index) + 0.5); }
  double middle_of(int64_t layer) const {
    return middle(static_cast<size_t>(std::ranges::find(layers_, layer) - layers_.begin()));
  }

  std::string numbers(double y) const {
    const auto every = static_cast<size_t>(std::ceil(28.0 / width_));
    std::string out;
    for (size_t i = 0; i < layers_.size(); i += every) {
      out += text(middle(i), y, "tick middle", std::to_string(layers_[i]));
    }
    return out + text(kLeft - 10, y, "tick end", "layer");
  }

 private:
  std::vector<int64_t> layers_;
  double width_;
};

struct Bar {
  std::string name;
  uint64_t converted = 0;
  uint64_t other = 0;

  uint64_t total() const { return converted + other; }
};

std::string bar_row(const Bar& bar, double y, double scale) {
  const double converted = static_cast<double>(bar.converted) * scale;
  const double other = static_cast<double>(bar.other) * scale;
  const std::string own =
      fmt::format("converted matrices {}: {}", bar.name, bytes_text(bar.converted));
  const std::string rest = fmt::format("all else {}: {}", bar.name, bytes_text(bar.other));
  return text(kLeft - 10, y + 20, "label end", bar.name) +
         rect(kLeft, y, converted, 30, "class=\"main\"", own) +
         rect(kLeft + converted, y, other, 30, "class=\"rest\"", rest) +
         text(kLeft + converted + other + 8, y + 20, "label", bytes_text(bar.total()));
}

std::vector<int64_t> layers_of(const ConversionReport& report) {
  std::set<int64_t> layers;
  for (const ConvertedMatrix& module : report.matrices) layers.insert(module.layer);
  return {layers.begin(), layers.end()};
}

// The least error is still seen.
double opacity(double share) { return 0.15 + 0.85 * share; }

// The key names the numbers of the faintest and of the strongest colour.
std::string scale_key(double y, double lowest, double highest) {
  constexpr int kSteps = 12;
  constexpr double kStep = 10;
  const double begin = kLeft + 60;
  std::string out = text(begin - 8, y + 10, "tick end", percent(lowest, 3));
  for (int i = 0; i < kSteps; ++i) {
    out += rect(begin + kStep * i, y, kStep, 12,
                fmt::format("class=\"main\" fill-opacity=\"{:.3f}\"",
                            opacity(static_cast<double>(i) / (kSteps - 1))),
                percent(lowest + (highest - lowest) * i / (kSteps - 1), 3));
  }
  return out + text(begin + kStep * kSteps + 8, y + 10, "tick", percent(highest, 3));
}

std::string layer_dots(const ConvertedLayer& layer, const LogAxis& axis, double x, double width) {
  std::string out;
  const double spread = std::min(width * 0.5, 18.0);
  const auto count = static_cast<double>(layer.tokens.size());
  for (size_t i = 0; i < layer.tokens.size(); ++i) {
    if (!(layer.tokens[i] > 0)) continue;
    const double offset = ((static_cast<double>(i) + 0.5) / count - 0.5) * spread;
    out += dot(x + offset, axis.y(layer.tokens[i]), 1.6, "token",
               fmt::format("layer {}, token {}: {}", layer.layer, i, percent(layer.tokens[i])));
  }
  const double half = std::clamp(width * 0.36, 2.0, 16.0);
  const double y = axis.y(layer.median);
  return out + line(x - half, y, x + half, y, "median") +
         dot(x + ((static_cast<double>(layer.worst_token) + 0.5) / count - 0.5) * spread,
             axis.y(layer.worst), 3.6, "worst",
             fmt::format("layer {}, worst: token {}, {}; median {}", layer.layer, layer.worst_token,
                         percent(layer.worst), percent(layer.median)));
}

}  // namespace

std::string percent(double share, int digits) {
  const double value = 100 * share;
  if (!std::isfinite(value)) return fmt::format("{}", value);
  if (value == 0) return "0 %";
  const int decimals =
      std::clamp(digits - 1 - static_cast<int>(std::floor(std::log10(value))), 0, 7);
  return fmt::format("{:.{}f} %", value, decimals);
}

std::string size_chart(const ConversionReport& report) {
  Bar before{.name = "before"};
  Bar after{.name = "after"};
  for (const ConvertedMatrix& module : report.matrices) {
    before.converted += module.bytes_before;
    after.converted += module.bytes_after;
  }
  before.other = report.bytes_before - std::min(report.bytes_before, before.converted);
  after.other = report.bytes_after - std::min(report.bytes_after, after.converted);
  const auto largest = static_cast<double>(std::max(before.total(), after.total()));
  const double scale = (kPlotWidth - 90) / std::max(largest, 1.0);
  return svg(96, "Bytes before and after", bar_row(before, 8, scale) + bar_row(after, 52, scale));
}

std::string output_chart(const ConversionReport& report) {
  double lowest = 1;
  double highest = 0;
  std::vector<int64_t> layers;
  for (const ConvertedLayer& layer : report.layers) {
    layers.push_back(layer.layer);
    for (const double error : layer.tokens) {
      if (!(error > 0) || !std::isfinite(error)) continue;
      lowest = std::min(lowest, error);
      highest = std::max(highest, error);
    }
  }
  if (highest == 0) return "<p>Every output is the same in both models.</p>\n";
  constexpr double kBottom = 270;
  const LogAxis axis(lowest, highest, 14, kBottom);
  const Columns columns(std::move(layers));
  std::string content;
  for (const double mark : axis.marks()) {
    content += line(kLeft, axis.y(mark), columns.end(), axis.y(mark), "grid") +
               text(kLeft - 10, axis.y(mark) + 4, "tick end", percent(mark));
  }
  for (size_t i = 0; i < report.layers.size(); ++i) {
    content += layer_dots(report.layers[i], axis, columns.middle(i), columns.width());
  }
  return svg(kBottom + 34, "Error of outputs by layer", content + columns.numbers(kBottom + 22));
}

constexpr double kLeastSpread = 0.05;

std::string matrix_chart(const ConversionReport& report) {
  const std::vector<KindSummary> summaries = summarise(report);
  std::map<std::string, double> rows;  // their tops
  double lowest = HUGE_VAL;
  double highest = 0;
  for (const KindSummary& summary : summaries) {
    lowest = std::min(lowest, summary.median);
    highest = std::max(highest, summary.median);
  }
  // Smaller differences are not worth a colour, as where all weights come from one distribution.
  lowest = std::min(lowest, (1 - kLeastSpread) * highest);
  constexpr double kRow = 30;
  double y = 6;
  std::string content;
  // The order of the model's own tensors.
  for (const ConvertedMatrix& module : report.matrices) {
    if (!rows.emplace(module.kind, y).second) continue;
    content += text(kLeft - 10, y + 19, "label end", module.kind);
    y += kRow;
  }
  const Columns columns(layers_of(report));
  const double gap = columns.width() > 8 ? 2 : 0;
  for (const KindSummary& summary : summaries) {
    const double share = highest > lowest ? (summary.median - lowest) / (highest - lowest) : 0.5;
    const std::string title =
        fmt::format("layer {}, {}: median {} of {} matri{}, worst {}, at most {:.2f} steps",
                    summary.layer, summary.kind, percent(summary.median), summary.count,
                    summary.count == 1 ? "x" : "ces", percent(summary.worst), summary.worst_steps);
    content += rect(
        columns.middle_of(summary.layer) - columns.width() / 2 + gap / 2, rows.at(summary.kind),
        columns.width() - gap, kRow - 4,
        fmt::format("class=\"main\" fill-opacity=\"{:.3f}\" rx=\"2\"", 0.15 + 0.85 * share), title);
  }
  content += columns.numbers(y + 16) + scale_key(y + 34, lowest, highest);
  return svg(y + 52, "Error of matrices by kind and layer", content);
}

}  // namespace conclave::tool
