#include "convert/forms/method_options.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <charconv>

namespace conclave::inline v0::conversion {
namespace {

constexpr int64_t kMaxGroup = 65'536;
constexpr const char* kGroup = "group";
constexpr const char* kWholeRow = "row";

}  // namespace

void OptionTaker::take_group(int64_t& group) {
  const auto found = options_.find(kGroup);
  if (found == options_.end()) return;
  const std::string text = found->second;
  options_.erase(found);
  add(fmt::format("{}={}", kGroup, text));
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), group);
  const bool whole = problem == std::errc() && end == text.data() + text.size();
  if (text == kWholeRow) {
    group = 0;
    return;
  }
  if (whole && group >= 1 && group <= kMaxGroup) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "no such group of columns",
               .tensor = "format",
               .expected = fmt::format("group=row, or group=1 to {}", kMaxGroup),
               .found = fmt::format("'group={}'", text)});
}

bool OptionTaker::take(const std::string& word) {
  const auto found = options_.find(word);
  if (found == options_.end() || !found->second.empty()) return false;
  options_.erase(found);
  add(word);
  return true;
}

void OptionTaker::add(const std::string& text) {
  name_ += (name_.find(':') == std::string::npos ? ":" : ",") + text;
}

}  // namespace conclave::inline v0::conversion
