// The main function of every test program.
//
// With CONCLAVE_TEST_SAMPLE set, as in the sanitizers' runs, only some cases of large tables run:
// if a parametrised test has more than 24 values, every eighth runs, and at most 64. With
// CONCLAVE_TEST_SAMPLE_OF=values too, as for tables of types and sizes under ThreadSanitizer, which
// finds the same in each: if it has more than 6, every fourth, and at most 12.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>

namespace {

struct Sample {
  int small_table;
  int step;
  int most;
};
constexpr Sample kCases = {.small_table = 24, .step = 8, .most = 64};
constexpr Sample kValues = {.small_table = 6, .step = 4, .most = 12};

Sample sample_that_is_wanted() {
  const char* const of = std::getenv("CONCLAVE_TEST_SAMPLE_OF");
  return of != nullptr && std::string_view(of) == "values" ? kValues : kCases;
}

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

std::string filter_that_leaves(const Sample& sample) {
  std::map<std::string, int> sizes;
  for_each_case([&](const testing::TestInfo& test) { ++sizes[table_of(test)]; });
  std::map<std::string, int> seen;
  std::string filter = "*";
  char separator = '-';
  for_each_case([&](const testing::TestInfo& test) {
    const std::string table = table_of(test);
    const int size = sizes[table];
    if (table.empty() || size <= sample.small_table) return;
    const int step = std::max(sample.step, (size + sample.most - 1) / sample.most);
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
    testing::GTEST_FLAG(filter) = filter_that_leaves(sample_that_is_wanted());
  }
  return RUN_ALL_TESTS();
}
