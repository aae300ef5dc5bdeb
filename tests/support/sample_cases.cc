// Tables of about the size where a sample begins to leave values out; the test that starts this
// program counts which cases run.
#include <gtest/gtest.h>

namespace conclave::testing {
namespace {

class Table : public ::testing::TestWithParam<int> {};

TEST_P(Table, Value) { EXPECT_GE(GetParam(), 0); }
INSTANTIATE_TEST_SUITE_P(Small, Table, ::testing::Range(0, 24));
INSTANTIATE_TEST_SUITE_P(Large, Table, ::testing::Range(0, 25));
INSTANTIATE_TEST_SUITE_P(Huge, Table, ::testing::Range(0, 1280));

TEST(Plain, Case) { SUCCEED(); }

}  // namespace
}  // namespace conclave::testing
