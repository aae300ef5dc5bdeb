#include "output/report_error.h"

#include "exit_code.h"

#include <gtest/gtest.h>

namespace conclave::tool {
namespace {

TEST(ReportError, AllFields_AreNamedAndAligned) {
  const Error error(ErrorCode::kTensorShape, {.what = "the shape is wrong",
                                              .file = "a.safetensors",
                                              .tensor = "x",
                                              .expected = "[*, 4]",
                                              .found = "[2, 3]",
                                              .limit = "none",
                                              .hint = "look"});
  EXPECT_EQ(describe_error(error),
            "conclave: error [kTensorShape]: the shape is wrong\n"
            "  file:     a.safetensors\n"
            "  tensor:   x\n"
            "  expected: [*, 4]\n"
            "  found:    [2, 3]\n"
            "  limit:    none\n"
            "  hint:     look\n");
}

TEST(ReportError, OptionInTensorField_IsCalledOption) {
  const Error error(ErrorCode::kInvalidArgument,
                    ErrorDetail{.what = "not a number", .tensor = "--tokens"});
  EXPECT_EQ(describe_error(error),
            "conclave: error [kInvalidArgument]: not a number\n"
            "  option:   --tokens\n");
}

TEST(ExitCodes, EveryClassOfError_HasItsCode) {
  EXPECT_EQ(exit_code(ErrorCode::kInvalidArgument), ExitCode::kUsage);
  EXPECT_EQ(exit_code(ErrorCode::kUnknownName), ExitCode::kUsage);
  EXPECT_EQ(exit_code(ErrorCode::kFileNotFound), ExitCode::kBadInput);
  EXPECT_EQ(exit_code(ErrorCode::kSafetensorsTruncatedData), ExitCode::kBadInput);
  EXPECT_EQ(exit_code(ErrorCode::kIndexTensorMissing), ExitCode::kBadInput);
  EXPECT_EQ(exit_code(ErrorCode::kLayerNotFound), ExitCode::kBadInput);
  EXPECT_EQ(exit_code(ErrorCode::kExpertId), ExitCode::kBadInput);
  EXPECT_EQ(exit_code(ErrorCode::kOutOfMemory), ExitCode::kResources);
  EXPECT_EQ(exit_code(ErrorCode::kFileWrite), ExitCode::kResources);
  EXPECT_EQ(exit_code(ErrorCode::kCancelled), ExitCode::kCancelled);
  EXPECT_EQ(exit_code(ErrorCode::kInternal), ExitCode::kInternal);
}

}  // namespace
}  // namespace conclave::tool
