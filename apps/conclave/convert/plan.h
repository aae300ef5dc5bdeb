// The plan of a conversion lists the linear layers that get codes, every tensor of the result with
// the shard that holds it, and config.json.
#pragma once

#include "convert/request.h"
#include "convert/source_model.h"
#include "synth/form_tensors.h"

#include "conclave/weights.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::tool {

// One matrix of the source; a module may hold several, their rows in turn.
struct ModulePart {
  WeightId id = weights::kGate;
  int64_t expert = 0;
  int64_t rows = 0;
};

// A linear layer that is written anew.
struct ConvertedModule {
  std::string name;  // "model.layers.0.mlp.experts.3.down_proj"
  int64_t layer = 0;
  std::vector<ModulePart> parts = {};
  int64_t rows = 0;
  int64_t cols = 0;
  WeightForm form;
  uint64_t source_bytes = 0;  // weights and planes, by their share of a tensor
};

struct PlannedTensor {
  std::string name;
  DType dtype = DType::kBF16;
  std::vector<int64_t> shape;
  uint64_t bytes = 0;
  const SourceTensor* copied = nullptr;  // or a tensor of a module:
  int32_t module = -1;
  WeightPlane plane = WeightPlane::kWeights;
  FormTensor::Content content = FormTensor::Content::kPlane;
};

struct PlannedShard {
  std::string file_name;
  std::vector<PlannedTensor> tensors = {};  // those of a module follow each other, its codes first
  uint64_t bytes = 0;
};

struct ConversionPlan {
  std::vector<ConvertedModule> modules;
  std::vector<PlannedShard> shards;
  std::string config;  // text of config.json
  uint64_t bytes = 0;  // in all tensors

  nlohmann::ordered_json index() const;
};

// Throws Error(kUnsupported), naming the tensor or linear layer, for what no form of the result can
// say, and Error(kInvalidArgument) for a rule of --keep that matches nothing.
ConversionPlan plan_conversion(const SourceModel& source, const ConvertRequest& request);

// Opens the result as it would be, without data. Throws Error(kUnsupported) with the reason if no
// layer of this library could read it.
void require_readable(const ConversionPlan& plan, const ConvertRequest& request,
                      const std::filesystem::path& scratch);

}  // namespace conclave::tool
