// The one list of what describes a layer: names belong to their values, in depth and in order.
#include "core/spec_fields.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

namespace conclave {
namespace {

template <class Struct>
std::vector<std::string> names_of(const Struct& value) {
  std::vector<std::string> names;
  for_each_field(value, "", [&](const std::string& name, const auto&) { names.push_back(name); });
  return names;
}

// The address of the member that goes by `name`.
template <class Struct>
const void* find_field(const Struct& value, const std::string& wanted) {
  const void* found = nullptr;
  for_each_field(value, "", [&](const std::string& name, const auto& member) {
    if (name == wanted) found = &member;
  });
  return found;
}

TEST(SpecFields, Names_BelongToTheirMembers) {
  const MoeSpec spec;
  EXPECT_EQ(find_field(spec, "num_experts"), &spec.num_experts);
  EXPECT_EQ(find_field(spec, "quant.has_column_factors"), &spec.quant.has_column_factors);
  EXPECT_EQ(find_field(spec, "router.name"), &spec.router.name);
  EXPECT_EQ(find_field(spec, "router.simulated.seed"), &spec.router.simulated.seed);
  EXPECT_EQ(find_field(spec, "router.input_norm.epsilon"), &spec.router.input_norm.epsilon);
  EXPECT_EQ(find_field(spec, "router.options"), &spec.router.options);
  EXPECT_EQ(find_field(spec, "shared.activation.beta"), &spec.shared.activation.beta);
  EXPECT_EQ(find_field(spec, "has_gate"), &spec.has_gate);
  EXPECT_EQ(find_field(spec, "residual.weight_dtype"), &spec.residual.weight_dtype);
  EXPECT_EQ(find_field(spec, "no such member"), nullptr);
  const LayerOptions options;
  EXPECT_EQ(find_field(options, "kernel"), &options.kernel);
  EXPECT_EQ(find_field(options, "tuning"), &options.tuning);
  const ParallelSpec parallel;
  EXPECT_EQ(find_field(parallel, "ep_size"), &parallel.ep_size);
  EXPECT_EQ(find_field(parallel, "reduce"), &parallel.reduce);
}

template <class Struct>
void expect_all_differ(const Struct& value) {
  const std::vector<std::string> names = names_of(value);
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), names.size());
  for (const std::string& name : names) {
    EXPECT_FALSE(name.empty());
    EXPECT_EQ(name.find_first_of(" ,"), std::string::npos) << name;
  }
}

TEST(SpecFields, Names_AreDistinctWords) {
  expect_all_differ(MoeSpec{});
  expect_all_differ(LayerOptions{});
  expect_all_differ(ParallelSpec{});
}

TEST(SpecFields, Members_ComeInOrder) {
  const MoeSpec spec;
  std::vector<const void*> addresses;
  for_each_field(spec, "",
                 [&](const std::string&, const auto& member) { addresses.push_back(&member); });
  EXPECT_TRUE(std::ranges::is_sorted(addresses));
}

}  // namespace
}  // namespace conclave
