// The plan of a conversion lists the linear layers that get codes, every tensor of the result with
// the shard that holds it, and config.json.
#pragma once

#include "convert/module.h"
#include "convert/request.h"
#include "convert/source_model.h"

#include "conclave/gguf.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace conclave::inline v0::conversion {

// A matrix as reports list it: a module, or the part of one that an expert has.
struct PlannedMatrix {
  std::string name;  // the module's, and "[3]" for an expert of several
  int32_t module = 0;
  std::string kind;  // "gate", "shared_down", "gate_up" for both in one
  int64_t rows = 0;
};

struct PlannedShard {
  std::string file_name;
  std::vector<PlannedTensor> tensors = {};  // those of a module follow each other, its codes first
  uint64_t bytes = 0;
};

struct ConversionPlan {
  std::vector<ConvertedModule> modules;
  std::vector<PlannedMatrix> matrices;
  std::vector<PlannedShard> shards;
  std::vector<std::string> kept;  // linear layers without codes
  uint64_t bytes = 0;             // in all tensors
  // Keys of a GGUF file that has none of the source's.
  std::vector<GgufKey> keys = {};
  std::string config = {};  // the text of config.json, if the source has none
  // Why a result in another container has MoE layers alone; empty: it is a whole model.
  std::string incomplete = {};
  std::string no_tokenizer = {};           // why a whole model has none
  std::vector<std::string> left_out = {};  // tensors of the source that the result has not
  std::vector<FormPointer> forms = {};     // that modules have beside those of the request
};

// The name of the layer whose weight the tensor is: that of the tensor without ".weight".
std::string linear_layer_of(const std::string& tensor);

// Puts units of tensors into shards, which are named when their number is known.
void fill_shards(std::vector<std::vector<PlannedTensor>> units, uint64_t shard_bytes,
                 const std::function<std::string(size_t index, size_t count)>& name_of,
                 ConversionPlan& plan);

// Throws Error(kUnsupported), naming the tensor or linear layer, for what no form of the result can
// say, and Error(kInvalidArgument) for a rule that matches nothing.
ConversionPlan plan_conversion(const SourceModel& source, const ResolvedRequest& request);

}  // namespace conclave::inline v0::conversion
