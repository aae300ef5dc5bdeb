// Shapes of SVG for pages whose style sheet gives colours by class.
#pragma once

#include <string>
#include <string_view>

namespace conclave::tool::drawing {

inline constexpr double kWidth = 860;  // a drawing fills its page

std::string svg(double height, std::string_view label, const std::string& content);
// `classes`: end and middle say where the text is anchored, tick and label how it looks.
std::string text(double x, double y, std::string_view classes, std::string_view content);
// `attributes` are markup, such as class="main"; `title` is shown when it is pointed at.
std::string rect(double x, double y, double width, double height, std::string_view attributes,
                 std::string_view title);
std::string line(double x1, double y1, double x2, double y2, std::string_view classes);
std::string dot(double x, double y, double radius, std::string_view classes,
                std::string_view title);

}  // namespace conclave::tool::drawing
