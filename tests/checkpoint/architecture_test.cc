// Properties that every table must have, whatever family is added.
#include "checkpoint/architecture.h"

#include "checkpoint/layer_tensors.h"
#include "checkpoint/tensor_name.h"

#include "conclave/checkpoint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

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

TEST_P(ArchitectureTable, Patterns_AreUnique) {
  std::set<std::string_view> texts;
  for (const ExpertForm& form : GetParam()->expert_forms) {
    for (const NamePattern& pattern : form.patterns) {
      EXPECT_TRUE(texts.insert(pattern.text).second) << pattern.text;
    }
  }
  for (const NamePattern& pattern : GetParam()->once) {
    EXPECT_TRUE(texts.insert(pattern.text).second) << pattern.text;
  }
}

TEST_P(ArchitectureTable, EachForm_HoldsGateUpAndDownOnce) {
  ASSERT_FALSE(GetParam()->expert_forms.empty());
  for (const ExpertForm& form : GetParam()->expert_forms) {
    int gate = 0, up = 0, down = 0;
    for (const NamePattern& pattern : form.patterns) {
      EXPECT_TRUE(is_expert_part(pattern.part)) << pattern.text;
      gate += pattern.part == Part::kGate || pattern.part == Part::kGateUp;
      up += pattern.part == Part::kUp || pattern.part == Part::kGateUp;
      down += pattern.part == Part::kDown;
      EXPECT_EQ(has_expert_placeholder(pattern.text), form.name == "per_expert") << pattern.text;
    }
    EXPECT_EQ(gate, 1);
    EXPECT_EQ(up, 1);
    EXPECT_EQ(down, 1);
  }
}

TEST_P(ArchitectureTable, PerExpertAndStackedForms_AreBothKnown) {
  std::set<std::string_view> names;
  for (const ExpertForm& form : GetParam()->expert_forms) names.insert(form.name);
  EXPECT_TRUE(names.contains("per_expert"));
  EXPECT_TRUE(names.contains("stacked"));
}

TEST_P(ArchitectureTable, Patterns_LieInStrictBlocks) {
  for (const ExpertForm& form : GetParam()->expert_forms) {
    for (const NamePattern& pattern : form.patterns) {
      EXPECT_TRUE(in_moe_block(*GetParam(), pattern.text)) << pattern.text;
      EXPECT_TRUE(looks_like_expert(*GetParam(), render_pattern(pattern.text, 3)));
    }
  }
  for (const NamePattern& pattern : GetParam()->once) {
    EXPECT_TRUE(in_moe_block(*GetParam(), pattern.text)) << pattern.text;
    EXPECT_FALSE(is_expert_part(pattern.part));
  }
}

TEST_P(ArchitectureTable, SharedExpert_HasSizeAndAllParts) {
  const auto holds = [&](Part part) {
    return std::any_of(GetParam()->once.begin(), GetParam()->once.end(),
                       [&](const NamePattern& pattern) { return pattern.part == part; });
  };
  EXPECT_TRUE(holds(Part::kRouter));
  const bool shared = GetParam()->shared != SharedMode::kNone;
  EXPECT_EQ(GetParam()->sizes.shared_intermediate_size.empty(), !shared);
  EXPECT_EQ(holds(Part::kSharedGate), shared);
  EXPECT_EQ(holds(Part::kSharedUp), shared);
  EXPECT_EQ(holds(Part::kSharedDown), shared);
  EXPECT_EQ(holds(Part::kSharedExpertGate), GetParam()->shared == SharedMode::kSigmoidGate);
}

TEST(ArchitectureCatalog, ModelTypes_AreListedSortedAndOnce) {
  const std::vector<std::string> types = known_model_types();
  EXPECT_TRUE(std::is_sorted(types.begin(), types.end()));
  EXPECT_EQ(std::set(types.begin(), types.end()).size(), types.size());
  for (const char* type : {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe"}) {
    EXPECT_TRUE(std::binary_search(types.begin(), types.end(), type)) << type;
  }
}

TEST(ArchitectureCatalog, UnknownType_IsNull) { EXPECT_EQ(find_architecture("bert"), nullptr); }

}  // namespace
}  // namespace conclave::checkpoint
