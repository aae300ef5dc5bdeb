#include "checkpoint/gguf/model.h"

#include "checkpoint/gguf/hashed_file.h"
#include "checkpoint/gguf/layer_demands.h"
#include "checkpoint/gguf/layer_form.h"
#include "checkpoint/gguf/layer_tensors.h"
#include "checkpoint/gguf/model_facts.h"
#include "checkpoint/gguf/source.h"
#include "checkpoint/gguf/stored_matrices.h"
#include "checkpoint/gguf/tensor_table.h"
#include "io/gguf/file.h"

#include "conclave/error.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace conclave::inline v0::checkpoint {
namespace {

uint64_t count_elements(const io::GgufTensor& tensor) {
  const auto shape = tensor.shape();
  return std::accumulate(
      shape.begin(), shape.end(), uint64_t{1},
      [](uint64_t product, int64_t size) { return product * static_cast<uint64_t>(size); });
}

class GgufContents final : public Contents {
 public:
  GgufContents(const std::filesystem::path& file_path, const CheckpointOptions& options)
      : file_(io::GgufFile::open(file_path, options.access)) {
    const io::GgufFile::Part& first = file_.parts().front();
    const GgufModel model(first.header, first.file.name());
    path = file_path;
    model_type = model.family.model_type;
    architecture = model.architecture();
    num_hidden_layers = model.num_hidden_layers;
    const GgufTensorTable tensors(file_);
    const GgufLayerRules rules(model, tensors);
    const int64_t end = options.extra_layers ? model.num_blocks : num_hidden_layers;
    for (int64_t index = 0; index < end; ++index) {
      if (!rules.has_experts(index)) continue;
      const GgufDemands demands = rules.demands_of(index);
      add_layer(model, find_layer_tensors(tensors, index, model.sizes, demands));
    }
    add_totals();
    if (options.verify_manifest) verifier_ = std::make_unique<GgufVerifier>(file_path, file_);
  }

  std::unique_ptr<WeightSource> source(size_t position) const override {
    return std::make_unique<GgufSource>(tensors_[position], forms_[position], verifier_.get());
  }

  std::vector<StoredMatrix> stored_matrices(size_t position) const override {
    return name_gguf_matrices(file_, tensors_[position]);
  }

  std::vector<std::string> tensors_of(size_t position) const override {
    const GgufLayer& layer = tensors_[position];
    std::vector<std::string> names;
    const auto add = [&](const GgufMatrix& matrix) {
      if (matrix.place) names.push_back(matrix.place.tensor->name);
    };
    for (const WeightId id : weights::kAll) std::ranges::for_each(layer.stored[id].matrices, add);
    for (const GgufMatrix* factor : {&layer.gate_factor, &layer.up_factor, &layer.down_factor}) {
      add(*factor);
    }
    return names;
  }

 private:
  void add_layer(const GgufModel& model, GgufLayer found) {
    const GgufForm form = form_of(found);
    layers.push_back(describe_gguf_layer(model, found, form));
    tensors_.push_back(std::move(found));
    forms_.push_back(form);
  }

  void add_totals() {
    for (const io::GgufFile::Part& part : file_.parts()) {
      for (const io::GgufTensor& tensor : part.header.tensors) {
        total_bytes += tensor.bytes;
        total_parameters += count_elements(tensor);
      }
    }
  }

  io::GgufFile file_;
  std::vector<GgufLayer> tensors_;  // in the order of `layers`, as the forms are
  std::vector<GgufForm> forms_;
  std::unique_ptr<GgufVerifier> verifier_;
};

void check_options(const CheckpointOptions& options) {
  if (options.experts == ExpertSet::kText) return;
  throw Error(ErrorCode::kInvalidArgument, {.what = "a GGUF file does not take this option",
                                            .tensor = "CheckpointOptions.experts"});
}

}  // namespace

std::unique_ptr<Contents> open_gguf(const std::filesystem::path& path,
                                    const CheckpointOptions& options) {
  check_options(options);
  return std::make_unique<GgufContents>(path, options);
}

}  // namespace conclave::inline v0::checkpoint
