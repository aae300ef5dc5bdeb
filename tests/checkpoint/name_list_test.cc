#include "checkpoint/name_list.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::checkpoint {
namespace {

TEST(FirstFew, LongLists_AreCutAndCounted) {
  EXPECT_EQ(first_few({}), "");
  EXPECT_EQ(first_few(std::vector<std::string>{"a", "b"}), "a, b");
  EXPECT_EQ(first_few(std::vector<std::string>{"a", "b", "c"}, 2), "a, b and 1 more");
}

TEST(RenderRanges, Runs_AreJoined) {
  EXPECT_EQ(render_ranges({}), "");
  EXPECT_EQ(render_ranges(std::vector<int64_t>{7}), "7");
  EXPECT_EQ(render_ranges(std::vector<int64_t>{0, 2, 3, 4, 9}), "0, 2 to 4, 9");
}

}  // namespace
}  // namespace conclave::checkpoint
