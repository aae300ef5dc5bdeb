#include "convert/forms/catalog.h"

#include "conclave/error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <utility>

namespace conclave::inline v0::conversion {
namespace {

const std::vector<FormRow>& all_rows() {
  static const std::vector<FormRow> kRows = [] {
    std::vector<FormRow> rows;
    for (const auto& list : {scheme_forms(), gptq_forms(), awq_forms(), bitsandbytes_forms(),
                             mlx_forms(), gpt_oss_forms(), gguf_forms(), plain_forms()}) {
      rows.insert(rows.end(), list.begin(), list.end());
    }
    return rows;
  }();
  return kRows;
}

std::vector<std::string> names_where(const auto& wanted) {
  std::vector<std::string> names;
  for (const FormRow& row : all_rows()) {
    const bool is_new = std::ranges::find(names, row.name) == names.end();
    if (wanted(row) && is_new) names.push_back(row.name);
  }
  return names;
}

// A form of one family serves models of that alone. Values in directories need no form.
bool is_of_random_models(const FormRow& row) {
  return !row.of_one_family && (row.has_codes || row.container == ModelContainer::kGguf);
}

std::string_view text_of(ModelContainer container) {
  return container == ModelContainer::kGguf ? "a GGUF file" : "a model of safetensors";
}

// Why a form does not serve that another conversion has.
const char* hint_about(ModelContainer container) {
  if (container == ModelContainer::kGguf)
    return "a directory takes it: ModelContainer::kSafetensors";
  return "a GGUF file takes GGUF's types: ModelContainer::kGguf";
}

FormOptions options_of(const std::string& text, size_t colon) {
  FormOptions options;
  size_t begin = colon;
  while (begin != std::string::npos) {
    const size_t comma = text.find(',', begin + 1);
    const std::string option = text.substr(begin + 1, comma - begin - 1);
    const size_t equals = std::min(option.find('='), option.size());
    const std::string value = option.substr(std::min(equals + 1, option.size()));
    if (equals == 0 || !options.emplace(option.substr(0, equals), value).second) {
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = "an option of the form is empty or stands twice",
                   .tensor = "format",
                   .expected = "NAME:OPTION,OPTION",
                   .found = fmt::format("'{}'", text)});
    }
    begin = comma;
  }
  return options;
}

FormPointer make_form(const FormRow& row, const std::string& text, size_t colon, ScaleRule rule) {
  FormOptions options = options_of(text, colon);
  FormPointer form = row.make(options, rule);
  if (options.empty()) return form;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "the form has no such option",
               .tensor = "format",
               .expected = row.options.empty() ? "no options" : row.options,
               .found = fmt::format("'{}'", options.begin()->first)});
}

template <class Wanted>
FormPointer parse(const std::string& text, ModelContainer container, ScaleRule rule,
                  const char* option, const Wanted& wanted) {
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  for (const FormRow& row : all_rows()) {
    if (row.name == name && row.container == container && wanted(row)) {
      return make_form(row, text, colon, rule);
    }
  }
  const auto takes = [&](const FormRow& row) { return row.container == container && wanted(row); };
  const bool known = std::ranges::any_of(
      all_rows(), [&](const FormRow& row) { return row.name == name && wanted(row); });
  throw Error(ErrorCode::kUnknownName,
              {.what = fmt::format("{} is not converted to this form", text_of(container)),
               .tensor = option,
               .expected = fmt::format("one of {}", fmt::join(names_where(takes), ", ")),
               .found = fmt::format("'{}'", text),
               .hint = known ? hint_about(container) : ""});
}

}  // namespace

std::vector<std::string> form_methods() {
  std::set<std::string> methods;
  for (const FormRow& row : all_rows()) {
    if (!row.method.empty()) methods.insert(row.method);
  }
  return {methods.begin(), methods.end()};
}

std::optional<ModelContainer> only_container_of(std::string_view text) {
  const std::string_view name = text.substr(0, text.find(':'));
  std::optional<ModelContainer> found;
  for (const FormRow& row : all_rows()) {
    const bool is_values_in_gguf = !row.has_codes && row.container == ModelContainer::kGguf;
    if (row.name != name || is_values_in_gguf) continue;
    if (found && *found != row.container) return std::nullopt;
    found = row.container;
  }
  return found;
}

FormPointer parse_form(const std::string& text, ModelContainer source, ModelContainer container,
                       ScaleRule rule) {
  const bool takes_values =
      source == ModelContainer::kGguf && container == ModelContainer::kSafetensors;
  return parse(text, container, rule, "format", [&](const FormRow& row) {
    return !row.of_random_models && (row.has_codes || takes_values);
  });
}

FormPointer parse_random_form(const std::string& text, ModelContainer container) {
  return parse(text, container, ScaleRule::kAmax, "format", is_of_random_models);
}

FormPointer parse_kept_form(const std::string& text, ModelContainer container, ScaleRule rule) {
  return parse(text, container, rule, "keep", [](const FormRow& row) {
    return !row.of_random_models && (!row.has_codes || row.mixes);
  });
}

}  // namespace conclave::inline v0::conversion

namespace conclave::inline v0 {

std::vector<ConversionFormat> conversion_formats() {
  std::vector<ConversionFormat> formats;
  for (const conversion::FormRow& row : conversion::all_rows()) {
    // Values in GGUF files are what matrices keep, not what a model becomes.
    const bool is_kept_alone = !row.has_codes && row.container == ModelContainer::kGguf;
    if (row.of_random_models || is_kept_alone) continue;
    formats.push_back({.name = row.name, .options = row.options, .container = row.container});
  }
  return formats;
}

std::vector<std::string> random_model_formats() {
  return conversion::names_where(conversion::is_of_random_models);
}

}  // namespace conclave::inline v0
