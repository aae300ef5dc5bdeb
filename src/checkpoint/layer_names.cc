#include "checkpoint/layer_names.h"

#include "checkpoint/generic_names.h"
#include "checkpoint/tensor_name.h"

#include <algorithm>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kBasePlaceholder = "{base}";

// Calls take(base number, pattern after the base, rest after the base) for each base that fits, or
// once for a pattern without one, until it returns true.
template <class Take>
bool for_each_base(const Architecture& architecture, std::string_view pattern,
                   std::string_view rest, Take take) {
  if (!pattern.starts_with(kBasePlaceholder)) return take(0, pattern, rest);
  pattern.remove_prefix(kBasePlaceholder.size());
  for (size_t i = 0; i < architecture.bases.size(); ++i) {
    const std::string_view base = architecture.bases[i];
    if (!rest.starts_with(base)) continue;
    if (take(static_cast<int32_t>(i), pattern, rest.substr(base.size()))) return true;
  }
  return false;
}

std::optional<NameMatch> match_one(const Architecture& architecture, const NamePattern& pattern,
                                   std::string_view rest) {
  NameMatch match{.pattern = &pattern};
  const bool fits = for_each_base(architecture, pattern.text, rest,
                                  [&](int32_t base, std::string_view text, std::string_view after) {
                                    const std::optional<int64_t> expert =
                                        match_pattern(text, after);
                                    match.base = base;
                                    match.expert = expert.value_or(0);
                                    return expert.has_value();
                                  });
  return fits ? std::optional(match) : std::nullopt;
}

}  // namespace

std::optional<NameMatch> match_name(const Architecture& architecture, std::string_view rest,
                                    const std::function<bool(const NamePattern&)>& wanted) {
  std::optional<NameMatch> found;
  for_each_form(architecture, [&](const ExpertForm& form) {
    for (const NamePattern& pattern : form.patterns) {
      if (found) return;
      found = match_one(architecture, pattern, rest);
      if (found && !wanted(pattern)) found.reset();
      if (found) found->form = &form;
    }
  });
  for_each_once(architecture, [&](const NamePattern& pattern) {
    if (found) return;
    found = match_one(architecture, pattern, rest);
    if (found && !wanted(pattern)) found.reset();
  });
  return found;
}

std::string render_name(const NamePattern& pattern, std::string_view base, int64_t expert) {
  std::string text = render_pattern(pattern.text, expert);
  if (text.starts_with(kBasePlaceholder)) text.replace(0, kBasePlaceholder.size(), base);
  return text;
}

bool looks_like_expert(const Architecture& architecture, std::string_view rest) {
  bool found = false;
  for_each_form(architecture, [&](const ExpertForm& form) {
    for (const NamePattern& pattern : form.patterns) {
      found = found || for_each_base(architecture, pattern.text, rest,
                                     [](int32_t, std::string_view text, std::string_view after) {
                                       return after.starts_with(
                                           text.substr(0, text.find(kExpertPlaceholder)));
                                     });
    }
  });
  return found;
}

bool is_router(const Architecture& architecture, std::string_view rest) {
  const auto match = match_name(
      architecture, rest, [](const NamePattern& pattern) { return pattern.part == Part::kRouter; });
  return match.has_value();
}

bool in_moe_block(const Architecture& architecture, std::string_view rest) {
  const auto starts = [&](std::string_view block) {
    return !block.empty() && rest.size() > block.size() && rest.starts_with(block);
  };
  return std::any_of(architecture.bases.begin(), architecture.bases.end(), starts) ||
         std::any_of(architecture.more_blocks.begin(), architecture.more_blocks.end(), starts);
}

}  // namespace conclave::inline v0::checkpoint
