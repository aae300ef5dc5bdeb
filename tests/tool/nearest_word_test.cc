#include "nearest_word.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace conclave::tool {
namespace {

const std::vector<std::string> kWords = {"run", "bench", "synth", "inspect", "verify"};

TEST(NearestWord, OneEditOfAnyKind_IsFound) {
  for (const char* word : {"rum", "runn", "urn"}) EXPECT_EQ(nearest_word(word, kWords), "run");
  EXPECT_EQ(nearest_word("inpsect", kWords), "inspect");
  EXPECT_EQ(nearest_word("run", kWords), "run");
}

TEST(NearestWord, HalfOfTheLettersWrong_IsNone) {
  for (const char* word : {"xyz", "", "r", "banana-split", "re"}) {
    EXPECT_EQ(nearest_word(word, kWords), "") << word;
  }
  EXPECT_EQ(nearest_word(std::string(100'000, 'r'), kWords), "");
}

}  // namespace
}  // namespace conclave::tool
