#include "output/page_parts.h"

#include <fmt/format.h>

namespace conclave::tool {
namespace {

constexpr std::string_view kStyle = R"(
:root { color-scheme: light dark; --paper: #fbfbf9; --card: #ffffff; --ink: #1d2430;
  --soft: #667085; --line: #e3e5e8; --main: #2563c9; --rest: #b9c3d1; --warm: #d9622b; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171c; --card: #1c2027; --ink: #e6e8ec; --soft: #98a2b3; --line: #2e343d;
    --main: #6ea3ff; --rest: #4a5462; --warm: #ff9460; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 2px; }
p { margin: 0 0 14px; color: var(--soft); max-width: 74ch; }
.tiles { display: grid; gap: 12px; margin: 24px 0;
  grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); }
.tile, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 14px 16px; }
.tile b { display: block; font-size: 20px; line-height: 1.5; font-weight: 600; }
@media (min-width: 820px) { .tiles { grid-template-columns: 1.4fr 1fr 1fr 1fr; } }
.tile span { color: var(--soft); font-size: 13px; }
section { padding: 20px 22px; margin: 0 0 16px; }
ul { margin: 4px 0 0; padding-left: 20px; } li { margin: 3px 0; max-width: 78ch; }
.figure { overflow-x: auto; } .figure svg { min-width: 520px; }
svg { width: 100%; height: auto; display: block; font-size: 12px; }
svg text { fill: var(--ink); } svg .tick { fill: var(--soft); }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; }
svg .main { fill: var(--main); } svg .rest { fill: var(--rest); }
svg .grid { stroke: var(--line); } svg .median { stroke: var(--main); stroke-width: 2.5; }
svg .token { fill: var(--soft); fill-opacity: .55; } svg .worst { fill: var(--warm); }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; color: var(--soft); font-size: 13px;
  margin: 0 0 10px; }
.key i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
.columns { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); }
.columns section { margin: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 0 5px 12px; border-top: 1px solid var(--line);
  white-space: nowrap; }
th { border-top: 0; color: var(--soft); font-weight: 500; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td.name { white-space: normal; overflow-wrap: anywhere; }
footer { margin-top: 20px; color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
)";

std::string row(const std::vector<std::string>& cells, std::string_view tag) {
  std::string out = "<tr>";
  for (size_t i = 0; i < cells.size(); ++i) {
    const char* name = i == 0 && tag == "td" ? " class=\"name\"" : "";
    out += fmt::format("<{}{}>{}</{}>", tag, name, escaped(cells[i]), tag);
  }
  return out + "</tr>\n";
}

}  // namespace

std::string escaped(std::string_view raw) {
  std::string out;
  for (const char c : raw) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += c;
    }
  }
  return out;
}

namespace page {

std::string document(std::string_view title, const std::string& content) {
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>{}</title>\n<style>{}</style>\n</head>\n<body>\n<main>\n{}</main>\n</body>\n"
      "</html>\n",
      escaped(title), kStyle, content);
}

std::string tile(std::string_view value, std::string_view meaning) {
  return fmt::format("<div class=\"tile\"><b>{}</b><span>{}</span></div>\n", escaped(value),
                     escaped(meaning));
}

std::string key(std::string_view colour, std::string_view meaning) {
  return fmt::format("<span><i style=\"background: var(--{})\"></i>{}</span>", colour,
                     escaped(meaning));
}

std::string legend(const std::string& keys) { return "<div class=\"key\">" + keys + "</div>\n"; }

std::string section(std::string_view title, std::string_view text, const std::string& content) {
  const std::string below = text.empty() ? "" : fmt::format("<p>{}</p>", escaped(text));
  return fmt::format("<section><h2>{}</h2>{}\n{}</section>\n", escaped(title), below, content);
}

std::string table(const std::vector<std::string>& titles,
                  const std::vector<std::vector<std::string>>& rows) {
  std::string out = "<div class=\"scroll\"><table>\n" + row(titles, "th");
  for (const auto& cells : rows) out += row(cells, "td");
  return out + "</table></div>\n";
}

}  // namespace page
}  // namespace conclave::tool
