#include "output/drawing.h"

#include "output/page_parts.h"

#include <fmt/format.h>

#include <algorithm>

namespace conclave::tool::drawing {

std::string svg(double height, std::string_view label, const std::string& content) {
  return fmt::format(
      "<div class=\"figure\"><svg viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" "
      "aria-label=\"{}\">\n{}</svg></div>\n",
      kWidth, height, escaped(label), content);
}

std::string text(double x, double y, std::string_view classes, std::string_view content) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" class=\"{}\">{}</text>\n", x, y, classes,
                     escaped(content));
}

std::string rect(double x, double y, double width, double height, std::string_view attributes,
                 std::string_view title) {
  return fmt::format(
      "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" {}><title>{}</title>"
      "</rect>\n",
      x, y, std::max(width, 0.5), height, attributes, escaped(title));
}

std::string line(double x1, double y1, double x2, double y2, std::string_view classes) {
  return fmt::format(
      "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" class=\"{}\"/>\n", x1, y1, x2,
      y2, classes);
}

std::string dot(double x, double y, double radius, std::string_view classes,
                std::string_view title) {
  return fmt::format(
      "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\" class=\"{}\"><title>{}</title></circle>\n",
      x, y, radius, classes, escaped(title));
}

}  // namespace conclave::tool::drawing
