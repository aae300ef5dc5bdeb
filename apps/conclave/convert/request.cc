#include "convert/request.h"

#include "conclave/error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>

namespace conclave::tool {
namespace {

constexpr std::string_view kAsItIs = "source";

bool can_be_written(const WeightForm& form) {
  return !form.method.empty() && Quantiser::supports({.codes = form.dtype,
                                                      .quant = form.quant,
                                                      .scale_dtype = form.scale_dtype,
                                                      .rule = ScaleRule::kAmax});
}

}  // namespace

std::vector<std::string> quantised_form_names() {
  std::vector<std::string> names;
  for (const WeightForm& form : weight_forms()) {
    if (can_be_written(form)) names.emplace_back(form.name);
  }
  return names;
}

WeightForm parse_quantised_form(const std::string& name) {
  for (const WeightForm& form : weight_forms()) {
    if (form.name == name && can_be_written(form)) return form;
  }
  throw Error(ErrorCode::kUnknownName,
              {.what = "no model is converted to this form",
               .tensor = "--format",
               .expected = fmt::format("one of {}", fmt::join(quantised_form_names(), ", ")),
               .found = fmt::format("'{}'", name)});
}

KeepRule parse_keep_rule(const std::string& text) {
  const size_t equals = text.rfind('=');
  const std::string name = equals == std::string::npos ? "" : text.substr(equals + 1);
  std::vector<std::string> known = {std::string(kAsItIs)};
  for (const WeightForm& form : weight_forms()) {
    if (!form.method.empty() || form.quant.weights != WeightScale::kNone) continue;
    known.emplace_back(form.name);
    if (name == form.name && equals > 0) return {.pattern = text.substr(0, equals), .form = form};
  }
  if (name == kAsItIs && equals > 0) return {.pattern = text.substr(0, equals), .form = {}};
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "no rule for layers to keep",
               .tensor = "--keep",
               .expected = fmt::format("PATTERN=FORMAT, FORMAT one of {}", fmt::join(known, ", ")),
               .found = fmt::format("'{}'", text)});
}

// Greedy with one place to come back to: the work is linear in the product of the lengths.
bool matches(std::string_view pattern, std::string_view name) {
  size_t at = 0;
  size_t star = std::string_view::npos;
  size_t resume = 0;
  size_t i = 0;
  while (i < name.size()) {
    if (at < pattern.size() && pattern[at] == '*') {
      star = at++;
      resume = i;
    } else if (at < pattern.size() && (pattern[at] == '?' || pattern[at] == name[i])) {
      ++at;
      ++i;
    } else if (star != std::string_view::npos) {
      at = star + 1;
      i = ++resume;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', at) == std::string_view::npos;
}

}  // namespace conclave::tool
