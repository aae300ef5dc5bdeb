#include "convert/json_edit.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace conclave::inline v0::conversion {
namespace {

constexpr std::string_view kBlank = " \t\r\n";

struct Member {
  std::string_view key = {};  // as written, between the quotes
  size_t begin = 0;           // at the quote before the key
  size_t value = 0;
  size_t end = 0;
};

size_t skip_blank(std::string_view text, size_t at) {
  return std::min(text.find_first_not_of(kBlank, at), text.size());
}

// The end of the string that begins at a quote.
size_t string_end(std::string_view text, size_t at) {
  for (++at; at < text.size() && text[at] != '"'; ++at) {
    if (text[at] == '\\') ++at;
  }
  return std::min(at + 1, text.size());
}

// The end of the value at `at`: of a nested value, or the last character before a comma or bracket.
size_t value_end(std::string_view text, size_t at) {
  int depth = 0;
  size_t end = at;
  while (at < text.size()) {
    const char c = text[at];
    if (depth == 0 && (c == ',' || c == '}' || c == ']')) break;
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    at = c == '"' ? string_end(text, at) : at + 1;
    if (kBlank.find(c) == std::string_view::npos) end = at;
  }
  return end;
}

std::vector<Member> members_of(std::string_view text) {
  std::vector<Member> members;
  size_t at = skip_blank(text, std::min(text.find('{'), text.size() - 1) + 1);
  while (at < text.size() && text[at] == '"') {
    Member member{.begin = at};
    const size_t key_end = string_end(text, at);
    member.key = text.substr(at + 1, key_end - at - 2);
    member.value = skip_blank(text, skip_blank(text, key_end) + 1);
    member.end = value_end(text, member.value);
    members.push_back(member);
    at = skip_blank(text, member.end);
    if (at < text.size() && text[at] == ',') at = skip_blank(text, at + 1);
  }
  return members;
}

}  // namespace

std::string_view member_text(std::string_view object, std::string_view key) {
  const std::vector<Member> members = members_of(object);
  const auto found = std::ranges::find(members, key, &Member::key);
  return found == members.end() ? "" : object.substr(found->value, found->end - found->value);
}

std::string without_member(std::string_view object, std::string_view key) {
  const std::vector<Member> members = members_of(object);
  const auto found = std::ranges::find(members, key, &Member::key);
  std::string text(object);
  if (found == members.end()) return text;
  // The comma behind goes too, or that before the last one.
  const bool last = found + 1 == members.end();
  const size_t begin = last && found != members.begin() ? (found - 1)->end : found->begin;
  const size_t end = last ? found->end : (found + 1)->begin;
  return text.erase(begin, end - begin);
}

std::string with_member(std::string_view object, std::string_view key, std::string_view value) {
  std::string text = without_member(object, key);
  const std::vector<Member> members = members_of(text);
  std::string member = "\"" + std::string(key) + "\": " + std::string(value);
  const size_t open = text.find('{');
  if (members.empty()) return text.insert(open + 1, member);
  const std::string blank = text.substr(open + 1, members.front().begin - open - 1);
  return text.insert(members.back().end, "," + blank + member);
}

}  // namespace conclave::inline v0::conversion
