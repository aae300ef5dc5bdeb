// Pieces of reports that are one page of HTML, which needs nothing else: style, tiles, sections,
// tables. Text that is given is escaped; content is markup.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace conclave::tool {

// Replaces what HTML reads as markup.
std::string escaped(std::string_view text);

namespace page {

// The whole page around `content`.
std::string document(std::string_view title, const std::string& content);
std::string tile(std::string_view value, std::string_view meaning);
// An entry of a legend; `colour` is a variable of the style: main, rest, warm, soft.
std::string key(std::string_view colour, std::string_view meaning);
std::string legend(const std::string& keys);
// `text` may be empty.
std::string section(std::string_view title, std::string_view text, const std::string& content);
std::string table(const std::vector<std::string>& titles,
                  const std::vector<std::vector<std::string>>& rows);

}  // namespace page
}  // namespace conclave::tool
