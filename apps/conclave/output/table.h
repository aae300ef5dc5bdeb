// Writes one table in five formats: aligned text, Markdown, CSV, JSON, JSON lines.
#pragma once

#include "output/terminal.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::tool {

enum class OutputFormat : uint8_t { kTable, kMarkdown, kCsv, kJson, kJsonl };

// The values of --format, in help order. "md" is short for "markdown".
const std::vector<std::string>& output_format_names();
// Throws Error(kInvalidArgument).
OutputFormat parse_output_format(std::string_view name);
// Whether the format is for people, who want header lines and notes.
bool is_text(OutputFormat format);

enum class Align : uint8_t { kLeft, kRight };

// `key` names the value in CSV and JSON, `title` heads the column in text; an empty one leaves the
// column out there. `width` is the minimum width in text, since rows are printed as they come.
struct Column {
  std::string key;
  std::string title;
  int width = 0;
  Align align = Align::kRight;
};

// `value` is for machines, `text` for people.
struct Cell {
  nlohmann::ordered_json value;
  std::string text;
  Style style = Style::kPlain;
};
Cell absent_cell();  // null in JSON, "-" in text
Cell text_cell(std::string text, Style style = Style::kPlain);
Cell integer_cell(int64_t value);
Cell fixed_cell(double value, int decimals);
Cell error_cell(double value);
Cell ms_cell(double ms);
Cell share_cell(double share);

// Writes to `out` and flushes after each row. finish() writes JSON as a whole.
class TableWriter {
 public:
  TableWriter(std::FILE* out, OutputFormat format, std::vector<Column> columns);

  // Must come before the first row. `facts` are members of the JSON document, `lines` the text
  // above.
  void header(const nlohmann::ordered_json& facts, const std::vector<std::string>& lines);
  void row(const std::vector<Cell>& cells);
  // Writes a last line under a rule, or "total" in JSON; CSV and JSON lines leave it out.
  void total(const std::vector<Cell>& cells);
  // Writes text below the table; machine formats leave it out.
  void note(std::string_view text);
  // `key` names the array of rows in JSON.
  void finish(std::string_view key);

 private:
  void text_titles();
  void text_row(const std::vector<Cell>& cells);
  void rule();
  void csv_titles();
  void csv_row(const std::vector<Cell>& cells);
  nlohmann::ordered_json json_row(const std::vector<Cell>& cells) const;
  void write(std::string_view text);

  std::FILE* out_;
  OutputFormat format_;
  bool color_;
  std::vector<Column> columns_;
  std::vector<int> widths_;
  bool titles_written_ = false;
  nlohmann::ordered_json document_ = nlohmann::ordered_json::object();
  nlohmann::ordered_json rows_ = nlohmann::ordered_json::array();
};

// Returns JSON text even for names that are not UTF-8: those bytes become U+FFFD.
std::string json_text(const nlohmann::ordered_json& value, int indent);

}  // namespace conclave::tool
