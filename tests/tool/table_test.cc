#include "output/table.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>

namespace conclave::tool {
namespace {

const std::vector<Column> kColumns = {{"name", "name", 6, Align::kLeft},
                                      {"count", "count", 0, Align::kRight},
                                      {"hidden", "", 0, Align::kRight},
                                      {"", "shown", 7, Align::kRight}};

std::vector<Cell> make_row(std::string name, int64_t count) {
  return {text_cell(std::move(name)), integer_cell(count), fixed_cell(0.5, 1), {nullptr, "1 ± 2"}};
}

// The output of a table in a format, with a header, two rows, a total and a note.
std::string printed(OutputFormat format) {
  char* data = nullptr;
  size_t size = 0;
  std::FILE* stream = ::open_memstream(&data, &size);
  TableWriter table(stream, format, kColumns);
  table.header({{"machine", "m"}}, {"machine: m"});
  table.row(make_row("a", 1));
  table.row(make_row("b,\"c\"", 23));
  table.total(make_row("total", 24));
  table.note("note");
  table.finish("rows");
  std::fclose(stream);
  const std::unique_ptr<char, decltype(&std::free)> owner(data, &std::free);
  return std::string(data, size);
}

TEST(Table, Text_AlignsColumnsByDisplayWidth) {
  EXPECT_EQ(printed(OutputFormat::kTable),
            "machine: m\n"
            "\n"
            "name    count    shown\n"
            "------  -----  -------\n"
            "a           1    1 ± 2\n"
            "b,\"c\"      23    1 ± 2\n"
            "------  -----  -------\n"
            "total      24    1 ± 2\n"
            "note\n");
}

TEST(Table, Markdown_HasAlignmentRow) {
  EXPECT_EQ(printed(OutputFormat::kMarkdown),
            "machine: m  \n"
            "\n"
            "| name   | count |   shown |\n"
            "|:-------|------:|--------:|\n"
            "| a      |     1 |   1 ± 2 |\n"
            "| b,\"c\"  |    23 |   1 ± 2 |\n"
            "| total  |    24 |   1 ± 2 |\n"
            "note\n");
}

TEST(Table, Csv_QuotesAndHasOnlyRows) {
  EXPECT_EQ(printed(OutputFormat::kCsv),
            "name,count,hidden\n"
            "a,1,0.5\n"
            "\"b,\"\"c\"\"\",23,0.5\n");
}

TEST(Table, Json_HasFactsRowsAndTotal) {
  const auto document = nlohmann::json::parse(printed(OutputFormat::kJson));
  EXPECT_EQ(document["machine"], "m");
  ASSERT_EQ(document["rows"].size(), 2U);
  EXPECT_EQ(document["rows"][1]["name"], "b,\"c\"");
  EXPECT_EQ(document["rows"][1]["hidden"], 0.5);
  EXPECT_FALSE(document["rows"][0].contains("shown"));
  EXPECT_EQ(document["total"]["count"], 24);
}

TEST(Table, JsonLines_HasOneObjectPerRow) {
  const std::string text = printed(OutputFormat::kJsonl);
  EXPECT_EQ(text,
            "{\"name\":\"a\",\"count\":1,\"hidden\":0.5}\n"
            "{\"name\":\"b,\\\"c\\\"\",\"count\":23,\"hidden\":0.5}\n");
}

TEST(Table, NonFiniteNumbers_AreNullInJson) {
  EXPECT_EQ(json_text(error_cell(std::nan("")).value, -1), "null");
  EXPECT_EQ(error_cell(INFINITY).text, "inf");
}

TEST(Table, NameThatIsNotUtf8_StaysValidJson) {
  const std::string text = json_text(nlohmann::ordered_json("a\xff"), -1);
  EXPECT_EQ(nlohmann::json::parse(text), "a\xEF\xBF\xBD");
}

TEST(Table, EveryFormatName_Parses) {
  for (const std::string& name : output_format_names()) EXPECT_NO_THROW(parse_output_format(name));
  EXPECT_THROW(parse_output_format("xml"), Error);
}

}  // namespace
}  // namespace conclave::tool
