// Checks properties that every table must have, whatever family is added.
#include "checkpoint/architecture.h"

#include "checkpoint/generic_names.h"
#include "checkpoint/layer_names.h"
#include "checkpoint/spec_reader.h"
#include "checkpoint/tensor_name.h"

#include "conclave/checkpoint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace conclave::checkpoint {
namespace {

class ArchitectureTable : public ::testing::TestWithParam<const Architecture*> {};

INSTANTIATE_TEST_SUITE_P(AllFamilies, ArchitectureTable,
                         ::testing::ValuesIn(architectures().begin(), architectures().end()),
                         [](const auto& test) { return std::string(test.param->name); });

TEST_P(ArchitectureTable, ModelTypes_FindTheTable) {
  ASSERT_FALSE(GetParam()->model_types.empty());
  for (std::string_view type : GetParam()->model_types) {
    EXPECT_EQ(find_architecture(type), GetParam());
  }
}

std::vector<NamePattern> once_patterns(const Architecture& architecture) {
  std::vector<NamePattern> patterns;
  for_each_once(architecture, [&](const NamePattern& pattern) { patterns.push_back(pattern); });
  return patterns;
}

// A name may have two meanings, which the layer's spec tells apart, but not the same meaning twice.
TEST_P(ArchitectureTable, Patterns_AreUnique) {
  using Entry = std::pair<std::string_view, Part>;
  for_each_form(*GetParam(), [](const ExpertForm& form) {
    std::set<Entry> entries;
    for (const NamePattern& pattern : form.patterns) {
      EXPECT_TRUE(entries.emplace(pattern.text, pattern.part).second) << pattern.text;
    }
  });
  std::set<Entry> own;
  for (const NamePattern& pattern : GetParam()->once) {
    EXPECT_TRUE(own.emplace(pattern.text, pattern.part).second) << pattern.text;
  }
}

TEST_P(ArchitectureTable, EachForm_HoldsUpAndDownOnce) {
  for_each_form(*GetParam(), [](const ExpertForm& form) {
    int gate = 0, up = 0, down = 0;
    for (const NamePattern& pattern : form.patterns) {
      EXPECT_TRUE(is_expert_part(pattern.part)) << pattern.text;
      gate += pattern.part == Part::kGate || pattern.part == Part::kGateUp;
      up += pattern.part == Part::kUp || pattern.part == Part::kGateUp;
      down += pattern.part == Part::kDown;
      EXPECT_EQ(has_expert_placeholder(pattern.text), form.name.starts_with("per_expert"))
          << pattern.text;
    }
    EXPECT_LE(gate, 1);
    EXPECT_EQ(up, 1);
    EXPECT_EQ(down, 1);
  });
}

TEST_P(ArchitectureTable, Patterns_LieInStrictBlocks) {
  ASSERT_FALSE(GetParam()->bases.empty());
  for (const ExpertForm& form : GetParam()->expert_forms) {
    for (const NamePattern& pattern : form.patterns) {
      const std::string name = render_name(pattern, GetParam()->bases.front(), 3);
      EXPECT_TRUE(in_moe_block(*GetParam(), name)) << name;
      EXPECT_TRUE(looks_like_expert(*GetParam(), name)) << name;
    }
  }
  for (const NamePattern& pattern : GetParam()->once) {
    const std::string name = render_name(pattern, GetParam()->bases.front(), 0);
    EXPECT_TRUE(in_moe_block(*GetParam(), name)) << name;
    EXPECT_FALSE(is_expert_part(pattern.part));
  }
}

TEST_P(ArchitectureTable, Router_HasAName) {
  const auto patterns = once_patterns(*GetParam());
  EXPECT_TRUE(std::any_of(patterns.begin(), patterns.end(), [](const NamePattern& pattern) {
    return pattern.part == Part::kRouter;
  }));
}

TEST(ArchitectureCatalog, ModelTypes_AreListedSortedAndOnce) {
  const std::vector<std::string> types = known_model_types();
  EXPECT_TRUE(std::is_sorted(types.begin(), types.end()));
  EXPECT_EQ(std::set(types.begin(), types.end()).size(), types.size());
  for (const char* type : {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe"}) {
    EXPECT_TRUE(std::binary_search(types.begin(), types.end(), type)) << type;
  }
}

TEST(ConfigActivation, BoundsAndOwnFormulas_AreNoPartOfTheName) {
  for (const char* row : {"silu", "silu_clamp_before", "silu_clamp_after"}) {
    EXPECT_EQ(config_activation(ActivationForm::kClampBefore, row), "silu") << row;
  }
  EXPECT_EQ(config_activation(ActivationForm::kSwigluOai, "swiglu_oai"), "silu");
  EXPECT_EQ(config_activation(ActivationForm::kGated, "gelu_tanh"), "gelu_pytorch_tanh");
  EXPECT_EQ(config_activation(ActivationForm::kUngated, "relu2_no_mul"), "relu2");
  EXPECT_EQ(config_activation(ActivationForm::kUngated, "silu_clamp_after"), "");
  EXPECT_EQ(config_activation(ActivationForm::kGated, "nonsense"), "");
}

TEST(ArchitectureCatalog, UnknownType_IsNull) { EXPECT_EQ(find_architecture("bert"), nullptr); }

}  // namespace
}  // namespace conclave::checkpoint
