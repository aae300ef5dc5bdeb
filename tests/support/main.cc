// The main function of every test program.
//
// With CONCLAVE_TEST_SAMPLE set, as in the sanitizers' runs, only some cases of large tables run:
// if a parametrised test has more than 24 values, every eighth runs, and at most 64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>

namespace {

constexpr int kSmallTable = 24;
constexpr int kMostOfATable = 64;

// Returns "All/Table.Value/17" without its last part; an empty text for a case without a value.
std::string table_of(const testing::TestInfo& test) {
  if (test.value_param() == nullptr) return "";
  const std::string name = test.name();
  return std::string(test.test_suite_name()) + "." + name.substr(0, name.rfind('/'));
}

template <class Visit>
void for_each_case(Visit visit) {
  const testing::UnitTest& tests = *testing::UnitTest::GetInstance();
  for (int i = 0; i < tests.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *tests.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) visit(*suite.GetTestInfo(j));
  }
}

std::string filter_that_leaves_a_sample() {
  std::map<std::string, int> sizes;
  for_each_case([&](const testing::TestInfo& test) { ++sizes[table_of(test)]; });
  std::map<std::string, int> seen;
  std::string filter = "*";
  char separator = '-';
  for_each_case([&](const testing::TestInfo& test) {
    const std::string table = table_of(test);
    const int size = sizes[table];
    if (table.empty() || size <= kSmallTable) return;
    const int step = std::max(8, (size + kMostOfATable - 1) / kMostOfATable);
    if (seen[table]++ % step == 0) return;
    filter += separator;
    filter += std::string(test.test_suite_name()) + "." + test.name();
    separator = ':';
  });
  return filter;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (std::getenv("CONCLAVE_TEST_SAMPLE") != nullptr && testing::GTEST_FLAG(filter) == "*") {
    testing::GTEST_FLAG(filter) = filter_that_leaves_a_sample();
  }
  return RUN_ALL_TESTS();
}
