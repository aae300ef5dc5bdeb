// Converts a model: plans, writes what is missing, measures, publishes.
#pragma once

#include "convert/layer_errors.h"
#include "convert/plan.h"
#include "convert/request.h"

#include "conclave/context.h"
#include "conclave/quantise.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::tool {

struct ModuleReport {
  std::string name;
  int64_t layer = 0;
  std::string kind;  // "gate", "shared_down", "gate_up" for both in one
  int64_t rows = 0;
  int64_t cols = 0;
  std::string form;
  uint64_t bytes_before = 0;
  uint64_t bytes_after = 0;
  QuantiseError error = {};
};

struct ConversionReport {
  std::string source;
  std::string destination;
  std::string model_type;
  std::string form;
  std::string scales;  // "amax" or "search"
  int64_t tokens = 0;  // rows of a layer; of the most, where a file has its own for each
  uint64_t seed = 0;
  std::string input = {};     // the file of recorded rows; empty: they are random
  uint64_t bytes_before = 0;  // in all tensors
  uint64_t bytes_after = 0;
  size_t shards = 0;
  size_t shards_kept = 0;  // finished by an earlier run
  std::vector<ModuleReport> modules = {};
  std::vector<LayerError> layers = {};     // empty without tokens
  std::vector<std::string> left_out = {};  // files that were not copied
  std::string incomplete = {};             // why the result has MoE layers and no whole model
  std::string no_tokenizer = {};           // why a whole model in another container has none
  std::vector<std::string> tensors_left_out = {};
  bool keeps_others = false;  // beside them, tensors that no layer reads
};

struct ErrorMeasurement {
  int64_t tokens = 32;  // random rows for each layer; 0: layers are not measured
  uint64_t seed = 0;
  std::string input = {};   // a file of rows, in place of random ones
  std::string record = {};  // in that file; empty: it has one record of each layer
};

// Throws Error: kUnsupported before anything is written, kFileWrite, kFileChanged, kTensorValue.
// Finished shards stay for a next run with the same request.
ConversionReport convert_model(const Context& context, const ConvertRequest& request,
                               const ErrorMeasurement& measurement);

}  // namespace conclave::tool
