#include "output/report_error.h"

#include "output/terminal.h"

#include <fmt/format.h>

#include <cstdio>
#include <utility>

namespace conclave::tool {
namespace {

std::string detail_lines(const ErrorDetail& detail) {
  const std::pair<const char*, const std::string&> fields[] = {
      {"file:", detail.file},   {"tensor:", detail.tensor}, {"expected:", detail.expected},
      {"found:", detail.found}, {"limit:", detail.limit},   {"hint:", detail.hint},
  };
  std::string lines;
  for (const auto& [label, value] : fields) {
    if (value.empty()) continue;
    // An argument of the tool is reported in the field for tensor names.
    const bool is_option = label == std::string_view("tensor:") && value.starts_with("--");
    lines += fmt::format("  {:<9} {}\n", is_option ? "option:" : label, value);
  }
  return lines;
}

std::string headline(ErrorCode code, std::string_view what) {
  return fmt::format(" [{}]: {}\n", to_string(code), what);
}

void print(std::string_view after_label, std::string_view details) {
  const std::string label = paint("error", Style::kBad, shows_color(stderr));
  fmt::print(stderr, "conclave: {}{}{}", label, after_label, details);
}

std::string_view sentence(const Error& error) {
  return error.detail().what.empty() ? std::string_view(error.what())
                                     : std::string_view(error.detail().what);
}

}  // namespace

std::string describe_error(const Error& error) {
  return "conclave: error" + headline(error.code(), sentence(error)) + detail_lines(error.detail());
}

void report_error(const Error& error) {
  print(headline(error.code(), sentence(error)), detail_lines(error.detail()));
}

void report_usage_error(std::string_view what, std::string_view hint) {
  print(headline(ErrorCode::kInvalidArgument, what), detail_lines({.hint = std::string(hint)}));
}

void report_warning(std::string_view message) {
  fmt::print(stderr, "conclave: warning: {}\n", message);
}

}  // namespace conclave::tool
