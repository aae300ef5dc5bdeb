// Every fault in a tensor of a golden model is named: each class of tensor of each family is
// dropped, renamed, resized and put twice.
#include "checkpoint/tiny_model.h"
#include "support/case_name.h"

#include "conclave/checkpoint.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator("testdata/models")) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// The name without the numbers of layer and expert.
std::string class_of(const std::string& name) {
  std::string text;
  for (size_t at = 0; at < name.size();) {
    const size_t end = std::min(name.find('.', at), name.size());
    const std::string component = name.substr(at, end - at);
    const bool number = std::all_of(component.begin(), component.end(),
                                    [](unsigned char c) { return std::isdigit(c) != 0; });
    text += (number ? "N" : component) + ".";
    at = end + 1;
  }
  return text;
}

// The layer's number: the first component that is a number.
int64_t first_number(const std::string& name) {
  const std::string text = class_of(name);
  const size_t components = static_cast<size_t>(
      std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(text.find("N.")), '.'));
  size_t at = 0;
  for (size_t i = 0; i < components; ++i) at = name.find('.', at) + 1;
  return std::stoll(name.substr(at));
}

class GoldenTensors : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const fs::path directory = fs::path("testdata/models") / GetParam();
    std::ifstream file(directory / "config.json");
    config_ = {std::istreambuf_iterator<char>(file), {}};
    const SafetensorsFile weights = SafetensorsFile::open(directory / "model.safetensors");
    for (const TensorInfo& info : weights.tensors()) {
      tensors_.emplace(info.name, weights.load(info.name));
    }
    CheckpointFeed feed = this->feed();
    for (const auto& [name, tensor] : tensors_) {
      if (!feed.put(name, tensor.view(), FeedMemory::kKeep)) continue;
      if (used_classes_.insert(class_of(name)).second) examples_.push_back(name);
    }
    ASSERT_TRUE(feed.missing().empty()) << feed.missing().front();
    ASSERT_GE(examples_.size(), 3U);
  }

  CheckpointFeed feed() const { return CheckpointFeed::from_config(config_); }
  // Feeds all tensors but one.
  CheckpointFeed feed_without(const std::string& absent) const {
    CheckpointFeed feed = this->feed();
    for (const auto& [name, tensor] : tensors_) {
      if (name != absent) feed.put(name, tensor.view(), FeedMemory::kKeep);
    }
    return feed;
  }
  std::string config_;
  std::map<std::string, Tensor> tensors_;
  std::set<std::string> used_classes_;
  std::vector<std::string> examples_;  // one name per class
};

INSTANTIATE_TEST_SUITE_P(Models, GoldenTensors, ::testing::ValuesIn(golden_names()),
                         [](const auto& test) { return case_name(test.param); });

// Weights of another modality are known but not read; the file decides whether there is a bias.
bool may_be_absent(const std::string& model, const std::string& name) {
  return name.ends_with("gate.weight_1") || name.ends_with("coefficient.bias") ||
         (model == "axk1" && name.ends_with("e_score_correction_bias"));
}

TEST_P(GoldenTensors, Dropped_IsNamedMissing) {
  for (const std::string& name : examples_) {
    const CheckpointFeed feed = feed_without(name);
    const std::vector<std::string> missing = feed.missing();
    if (missing.empty()) {
      const bool other_modality =
          GetParam().starts_with("ernie4_5_vl") || GetParam() == "longcat_flash";
      EXPECT_TRUE(may_be_absent(GetParam(), name) || other_modality) << name;
      continue;
    }
    ASSERT_EQ(missing.size(), 1U) << name;
    EXPECT_EQ(missing[0].substr(0, missing[0].find(' ')), name);
    const auto error = error_of([&] { feed.layer_source(first_number(name)); });
    ASSERT_TRUE(error) << name;
    EXPECT_EQ(error->code(), ErrorCode::kTensorMissing);
    EXPECT_EQ(error->detail().tensor, name);
  }
}

TEST_P(GoldenTensors, Renamed_IsNotTaken) {
  for (const std::string& name : examples_) {
    CheckpointFeed feed = feed_without(name);
    const Tensor& tensor = tensors_.at(name);
    bool taken = false;
    const auto error = error_of([&] { taken = feed.put(name + "x", tensor.view()); });
    EXPECT_FALSE(taken) << name;
    if (!error) continue;
    EXPECT_EQ(error->code(), ErrorCode::kTensorUnexpected) << error->what();
    EXPECT_NE(error->detail().hint.find(name), std::string::npos) << error->what();
  }
}

TEST_P(GoldenTensors, Resized_IsRejected) {
  for (const std::string& name : examples_) {
    if (name.ends_with("gate.weight_1")) continue;
    CheckpointFeed feed = feed_without(name);
    const Tensor& tensor = tensors_.at(name);
    std::vector<int64_t> shape(tensor.shape().dims().begin(), tensor.shape().dims().end());
    if (shape.empty()) continue;
    shape.back() += 1;
    const Tensor wider(tensor.dtype(), Shape(shape));
    const auto error = error_of([&] { feed.put(name, wider.view()); });
    ASSERT_TRUE(error) << name;
    EXPECT_EQ(error->code(), ErrorCode::kTensorShape) << error->what();
    EXPECT_EQ(error->detail().tensor, name);
    EXPECT_FALSE(error->detail().expected.empty());
  }
}

TEST_P(GoldenTensors, UnderASecondName_IsADuplicate) {
  const std::map<std::string, std::string> spellings = {
      {".gate.weight", ".router.weight"},
      {".gate.e_score_correction_bias", ".gate.expert_bias"},
      {".expert_bias", ".e_score_correction_bias"}};
  for (const std::string& name : examples_) {
    for (const auto& [one, other] : spellings) {
      if (!name.ends_with(one)) continue;
      CheckpointFeed feed = feed_without("");
      const std::string second = name.substr(0, name.size() - one.size()) + other;
      if (tensors_.contains(second)) continue;
      bool taken = false;
      const auto rejected = error_of([&] { taken = feed.put(second, tensors_.at(name).view()); });
      if (rejected || !taken) continue;
      const auto error = error_of([&] { feed.layer_source(first_number(name)); });
      ASSERT_TRUE(error) << second;
      EXPECT_EQ(error->code(), ErrorCode::kTensorDuplicate) << error->what();
    }
  }
}

}  // namespace
}  // namespace conclave::testing
