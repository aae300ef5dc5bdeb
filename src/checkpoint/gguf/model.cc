#include "checkpoint/gguf/model.h"

#include "checkpoint/gguf/family.h"
#include "checkpoint/gguf/hashed_file.h"
#include "checkpoint/gguf/keys.h"
#include "checkpoint/gguf/layer_demands.h"
#include "checkpoint/gguf/layer_form.h"
#include "checkpoint/gguf/layer_tensors.h"
#include "checkpoint/gguf/source.h"
#include "checkpoint/gguf/spec.h"
#include "checkpoint/gguf/stored_matrices.h"
#include "io/gguf/file.h"
#include "io/text.h"
#include "spec/layer_weights.h"

#include "conclave/error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace conclave::inline v0::checkpoint {
namespace {

// No model has more layers; the bound keeps the work on a hostile file small.
constexpr int64_t kMaxLayers = 4096;

uint64_t count_elements(const io::GgufTensor& tensor) {
  const auto shape = tensor.shape();
  return std::accumulate(
      shape.begin(), shape.end(), uint64_t{1},
      [](uint64_t product, int64_t size) { return product * static_cast<uint64_t>(size); });
}

const GgufFamily& family_of(const io::GgufFile& file, const GgufKeys& keys) {
  if (const GgufFamily* family = find_gguf_family(keys.architecture())) return *family;
  std::vector<std::string_view> names;
  for (const GgufFamily& family : gguf_families()) names.push_back(family.name);
  throw Error(ErrorCode::kUnknownArchitecture,
              {.what = "the architecture is not known to have experts",
               .file = file.parts().front().file.name(),
               .tensor = "general.architecture",
               .expected = fmt::format("one of {}", fmt::join(names, ", ")),
               .found = io::show_text(keys.architecture())});
}

class GgufContents final : public Contents {
 public:
  GgufContents(const std::filesystem::path& file_path, const CheckpointOptions& options)
      : file_(io::GgufFile::open(file_path, options.access)) {
    const GgufKeys keys(file_);
    const GgufFamily& family = family_of(file_, keys);
    path = file_path;
    model_type = family.model_type;
    architecture = "gguf " + keys.architecture();
    const SizeRange range{.low = 1, .high = kMaxLayers};
    const int64_t all = keys.size("block_count", std::nullopt, range);
    const int64_t extra = keys.size("nextn_predict_layers", 0, {.low = 0, .high = all - 1});
    num_hidden_layers = all - extra;
    const GgufSizes sizes = read_gguf_sizes(keys, family);
    const GgufTensorsByLayer by_layer = sort_by_layer(file_);
    const GgufLayerRules rules(keys, family, by_layer, num_hidden_layers, all);
    const int64_t end = options.extra_layers ? all : num_hidden_layers;
    for (int64_t index = 0; index < end; ++index) {
      if (!rules.has_experts(index)) continue;
      const GgufDemands demands = rules.demands_of(index);
      add_layer(keys, family, find_layer_tensors(file_, by_layer, index, sizes, demands));
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
  void add_layer(const GgufKeys& keys, const GgufFamily& family, GgufLayer found) {
    CheckpointLayer layer;
    layer.index = found.index;
    layer.prefix = found.prefix;
    layer.layout = found.layout;
    layer.bytes = found.bytes;
    const GgufForm form = form_of(found);
    layer.spec = read_gguf_spec(keys, family, found, form, layer.support);
    layer.parameters = count_weights(layer.spec);
    layers.push_back(std::move(layer));
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
