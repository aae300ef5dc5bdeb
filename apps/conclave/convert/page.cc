#include "convert/page.h"

#include "convert/charts.h"
#include "convert/report.h"
#include "output/numbers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <vector>

namespace conclave::tool {
namespace {

constexpr size_t kListed = 10;

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

std::string tile(std::string_view value, std::string_view meaning) {
  return fmt::format("<div class=\"tile\"><b>{}</b><span>{}</span></div>\n", escaped(value),
                     escaped(meaning));
}

std::string key(std::string_view colour, std::string_view meaning) {
  return fmt::format("<span><i style=\"background: var(--{})\"></i>{}</span>", colour,
                     escaped(meaning));
}

std::string section(std::string_view title, std::string_view text, const std::string& content) {
  return fmt::format("<section><h2>{}</h2><p>{}</p>\n{}</section>\n", escaped(title), escaped(text),
                     content);
}

std::string row(const std::vector<std::string>& cells, std::string_view tag) {
  std::string out = "<tr>";
  for (size_t i = 0; i < cells.size(); ++i) {
    const char* name = i == 0 && tag == "td" ? " class=\"name\"" : "";
    out += fmt::format("<{}{}>{}</{}>", tag, name, escaped(cells[i]), tag);
  }
  return out + "</tr>\n";
}

std::string table(const std::vector<std::string>& titles,
                  const std::vector<std::vector<std::string>>& rows) {
  std::string out = "<div class=\"scroll\"><table>\n" + row(titles, "th");
  for (const auto& cells : rows) out += row(cells, "td");
  return out + "</table></div>\n";
}

struct TokenError {
  int64_t layer = 0;
  size_t token = 0;
  double error = 0;
  double median = 0;
};

std::vector<TokenError> worst_tokens(const ConversionReport& report) {
  std::vector<TokenError> all;
  for (const LayerError& layer : report.layers) {
    for (size_t i = 0; i < layer.tokens.size(); ++i) {
      all.push_back({layer.layer, i, layer.tokens[i], layer.median});
    }
  }
  std::ranges::stable_sort(all, std::ranges::greater(), &TokenError::error);
  all.resize(std::min(all.size(), kListed));
  return all;
}

std::string token_table(const ConversionReport& report) {
  std::vector<std::vector<std::string>> rows;
  for (const TokenError& token : worst_tokens(report)) {
    rows.push_back({fmt::format("layer {}, token {}", token.layer, token.token),
                    percent(token.error, 3), percent(token.median, 3)});
  }
  return table({"token", "error", "layer's median"}, rows);
}

std::string matrix_table(const ConversionReport& report) {
  std::vector<const ModuleReport*> all;
  for (const ModuleReport& module : report.modules) all.push_back(&module);
  std::ranges::stable_sort(all, std::ranges::greater(),
                           [](const ModuleReport* module) { return module->error.relative(); });
  all.resize(std::min(all.size(), kListed));
  std::vector<std::vector<std::string>> rows;
  for (const ModuleReport* module : all) {
    rows.push_back({module->name, percent(module->error.relative(), 3),
                    fmt::format("{:.2f}", module->error.worst_steps)});
  }
  return table({"linear layer", "error", "steps"}, rows);
}

double relative_error(const ConversionReport& report) {
  QuantiseError sum;
  for (const ModuleReport& module : report.modules) sum.add(module.error);
  return sum.relative();
}

std::string tiles(const ConversionReport& report) {
  const auto before = static_cast<double>(report.bytes_before);
  const auto after = static_cast<double>(report.bytes_after);
  std::string out =
      tile(fmt::format("{} → {}", bytes_text(report.bytes_before), bytes_text(report.bytes_after)),
           fmt::format("{:.0f} % of the model's size", before > 0 ? 100 * after / before : 100.0));
  out += tile(percent(relative_error(report)), "relative error of all converted weights");
  if (report.layers.empty()) return out;
  const auto worst = std::ranges::max_element(report.layers, {}, &LayerError::median);
  out += tile(percent(worst->median),
              fmt::format("median output error of the worst layer, {}", worst->layer));
  const std::vector<TokenError> tokens = worst_tokens(report);
  if (tokens.empty()) return out;
  return out + tile(percent(tokens.front().error),
                    fmt::format("worst token: {} of layer {}", tokens.front().token,
                                tokens.front().layer));
}

std::string output_section(const ConversionReport& report) {
  if (report.layers.empty()) return {};
  const std::string legend = "<div class=\"key\">" + key("soft", "a token") +
                             key("main", "median of the layer") + key("warm", "worst token") +
                             "</div>\n";
  return section("Outputs of layers",
                 fmt::format("{} {} rows went through each layer of both models in float64. "
                             "The error of a token is the length of the difference over the "
                             "length of the original's output.",
                             report.tokens, report.input.empty() ? "random" : "recorded"),
                 legend + output_chart(report));
}

std::string worst_sections(const ConversionReport& report) {
  std::string out = "<div class=\"columns\">";
  if (!report.layers.empty()) {
    out +=
        section("Worst tokens", "Largest errors of outputs, over all layers.", token_table(report));
  }
  out += section("Worst matrices",
                 "Largest relative errors. Steps are distances between neighbouring codes; half "
                 "of one is rounding, more is what lies beyond the largest code.",
                 matrix_table(report));
  return out + "</div>\n";
}

// Results in another container may have less than the model.
std::string completeness(const ConversionReport& report) {
  std::string out;
  if (!report.incomplete.empty()) {
    out += fmt::format("<p><b>MoE layers alone:</b> {}.</p>\n", escaped(report.incomplete));
  }
  if (!report.no_tokenizer.empty()) {
    out += fmt::format("<p>No tokenizer: {}.</p>\n", escaped(report.no_tokenizer));
  }
  if (report.tensors_left_out.empty()) return out;
  return out + fmt::format("<p>{} tensor{} of the source {} not in the result, such as {}.</p>\n",
                           report.tensors_left_out.size(),
                           report.tensors_left_out.size() == 1 ? "" : "s",
                           report.tensors_left_out.size() == 1 ? "is" : "are",
                           escaped(report.tensors_left_out.front()));
}

}  // namespace

std::string conversion_page(const ConversionReport& report) {
  const std::string name = std::filesystem::path(report.destination).filename().string();
  const std::string legend = "<div class=\"key\">" + key("main", "converted matrices") +
                             key("rest", "all else") + "</div>\n";
  std::string page = fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>{0}: conversion to {1}</title>\n<style>{2}</style>\n</head>\n<body>\n<main>\n"
      "<h1>{0}</h1>\n<p>{3} experts as {1}, scales by {4}; {5} matrices.</p>\n",
      escaped(name), escaped(forms_text(report)), kStyle, escaped(report.model_type), report.scales,
      report.modules.size());
  page += completeness(report);
  page += "<div class=\"tiles\">\n" + tiles(report) + "</div>\n";
  page += section("Size", "Bytes of all tensors.", legend + size_chart(report));
  page += output_section(report);
  page += section("Matrices",
                  "Median relative error over the experts, by kind of matrix and layer: the "
                  "stronger the colour, the larger. A field says its numbers when pointed at.",
                  matrix_chart(report));
  page += worst_sections(report);
  page += fmt::format(
      "<footer>{} → {}; {} shard{}; {}. Everything on this page is also in "
      "conversion.json.</footer>\n</main>\n</body>\n</html>\n",
      escaped(report.source), escaped(report.destination), report.shards,
      report.shards == 1 ? "" : "s",
      report.input.empty() ? fmt::format("seed {}", report.seed)
                           : "rows of " + escaped(report.input));
  return page;
}

}  // namespace conclave::tool
