#include "conclave/error.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace conclave {
namespace {

TEST(Error, AllFieldsGiven_TextHoldsEachInOrder) {
  const Error error(ErrorCode::kTensorShape, {.what = "wrong shape",
                                              .file = "a.safetensors",
                                              .tensor = "w",
                                              .expected = "[2, 3]",
                                              .found = "[3, 2]",
                                              .limit = "4",
                                              .hint = "transpose it"});
  EXPECT_STREQ(error.what(),
               "a.safetensors: w: wrong shape; expected [2, 3]; found [3, 2]; limit 4 "
               "(transpose it)");
  EXPECT_EQ(error.code(), ErrorCode::kTensorShape);
}

TEST(Error, OnlyASentence_TextIsThatSentence) {
  EXPECT_STREQ(Error(ErrorCode::kState, "not ready").what(), "not ready");
}

TEST(Error, TwoFieldDetail_IsNotTakenForAString) {
  const Error error(ErrorCode::kNullPointer, {.what = "no data", .tensor = "hidden"});
  EXPECT_EQ(error.detail().tensor, "hidden");
}

TEST(CommError, PeerAndPhase_AreInTheText) {
  const CommError error(ErrorCode::kCommTimeout, 3, "dispatch", "no answer in 5 s");
  EXPECT_EQ(error.peer(), 3);
  EXPECT_EQ(error.phase(), "dispatch");
  EXPECT_STREQ(error.what(), "rank 3, phase dispatch: no answer in 5 s");
}

TEST(ErrorCode, EveryKnownCode_HasAUniqueName) {
  std::set<std::string_view> names;
  int known = 0;
  for (int32_t value = 0; value < 1000; ++value) {
    const std::string_view name = to_string(static_cast<ErrorCode>(value));
    if (name == "unknown") continue;
    ++known;
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_EQ(name.front(), 'k') << name;
  }
  EXPECT_GE(known, 60);
  EXPECT_EQ(to_string(ErrorCode::kPathEscape), "kPathEscape");
}

TEST(Support, NoWithReason_IsFalseAndKeepsTheReason) {
  EXPECT_TRUE(Support::yes());
  EXPECT_FALSE(Support::no("too small"));
  EXPECT_EQ(Support::no("too small").reason(), "too small");
  EXPECT_EQ(Support::yes().reason(), "");
}

}  // namespace
}  // namespace conclave
