#include "convert/conversion_options.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <optional>

namespace conclave::tool {
namespace {

TEST(KeepOption, Text_IsAPatternAndAFormat) {
  const KeepRule plain = parse_keep_rule("*.0.*=bf16");
  EXPECT_EQ(plain.pattern, "*.0.*");
  EXPECT_EQ(plain.format, "bf16");
  EXPECT_EQ(parse_keep_rule("a=b=source").pattern, "a=b");
  for (const char* wrong : {"", "x", "=bf16", "x="}) {
    EXPECT_THROW(parse_keep_rule(wrong), Error) << wrong;
  }
}

TEST(ContainerOption, NoName_IsNone) {
  EXPECT_EQ(parse_container(""), std::nullopt);
  EXPECT_EQ(parse_container("gguf"), ModelContainer::kGguf);
  EXPECT_EQ(parse_container("directory"), ModelContainer::kSafetensors);
}

TEST(OptionWords, FieldsAndEnumerators_AreCalledAsOptions) {
  const Error error(ErrorCode::kFileWrite,
                    {.what = "x", .tensor = "format", .hint = "or ExistingModel::kReplace does"});
  const Error told = in_words_of_options(error, "--dtype");
  EXPECT_EQ(told.code(), ErrorCode::kFileWrite);
  EXPECT_EQ(told.detail().what, "x");
  EXPECT_EQ(told.detail().tensor, "--dtype");
  EXPECT_EQ(told.detail().hint, "or --force does");
  EXPECT_EQ(in_words_of_options({ErrorCode::kShape, {.tensor = "keep"}}, "").detail().tensor,
            "--keep");
  EXPECT_EQ(in_words_of_options({ErrorCode::kShape, {.tensor = "a.weight"}}, "").detail().tensor,
            "a.weight");
}

}  // namespace
}  // namespace conclave::tool
