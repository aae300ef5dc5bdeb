#include "checkpoint/gguf/tensor_feed.h"

#include "checkpoint/gguf/fed_header.h"
#include "checkpoint/gguf/layer_demands.h"
#include "checkpoint/gguf/layer_form.h"
#include "checkpoint/gguf/layer_tensors.h"
#include "checkpoint/gguf/model_facts.h"
#include "checkpoint/gguf/row_reader.h"
#include "checkpoint/gguf/source.h"
#include "checkpoint/gguf/tensor_table.h"
#include "io/gguf/tensor_rules.h"
#include "io/text.h"

#include "conclave/error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr const char* kFedName = "tensors put";

io::GgufTensor describe(std::string_view name, const io::GgufType& type, const Shape& shape) {
  io::GgufTensor tensor{.name = std::string(name), .type = &type};
  const std::span<const int64_t> dims = shape.dims();
  const bool has_elements = std::ranges::all_of(dims, [](int64_t size) { return size > 0; });
  if (dims.size() > io::GgufTensor::kMaxRank || !has_elements) {
    throw Error(ErrorCode::kGgufShape,
                {.what = "the tensor has a shape that no file may have",
                 .tensor = io::show_name(name),
                 .found = fmt::format("[{}]", fmt::join(dims, ", ")),
                 .limit = fmt::format("{} dimensions, none of 0", io::GgufTensor::kMaxRank)});
  }
  tensor.rank = static_cast<uint32_t>(dims.size());
  std::ranges::copy(dims, tensor.dims.begin());
  tensor.bytes = io::gguf_tensor_bytes(tensor, kFedName);
  return tensor;
}

const io::GgufType& type_of_values(std::string_view name, DType dtype) {
  if (const io::GgufType* const type = gguf_type_of(dtype)) return *type;
  throw Error(ErrorCode::kTensorDType,
              {.what = "GGUF files have no values of this type",
               .tensor = io::show_name(name),
               .expected = "F32, F16, BF16, I32 or I64; others as bytes with their type",
               .found = std::string(to_string(dtype))});
}

std::string shape_text(const io::GgufTensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.shape(), ", "));
}

bool same_shape(const io::GgufTensor& one, const io::GgufTensor& other) {
  return std::ranges::equal(one.shape(), other.shape());
}

// A tensor that the header lists comes as it says.
void check_listed(const io::GgufTensor& listed, const io::GgufTensor& put) {
  const bool same_type = listed.type == put.type;
  if (same_type && same_shape(listed, put)) return;
  throw Error(same_type ? ErrorCode::kTensorShape : ErrorCode::kTensorDType,
              {.what = "the tensor is not as the header lists it",
               .file = kGgufHeaderName,
               .tensor = put.name,
               .expected = io::describe_tensor(listed),
               .found = io::describe_tensor(put)});
}

// A dense MLP in the place of experts: of these names the table keeps no bytes.
bool tells_that_layer_is_dense(std::string_view rest) {
  return rest == "ffn_down.weight" || rest == "ffn_up.weight";
}

class GgufFeed final : public FeedContents {
 public:
  explicit GgufFeed(FedHeader header)
      : header_(std::move(header)),
        model_(header_.first, kGgufHeaderName),
        tensors_(header_.list == GgufTensorList::kWhole ? kGgufHeaderName : kFedName,
                 header_.list) {
    for (io::GgufTensor& tensor : header_.listed) list(std::move(tensor));
    header_.listed.clear();
    const GgufLayerRules rules(model_, tensors_);
    for (int64_t index = 0; index < model_.num_hidden_layers; ++index) {
      if (!rules.has_experts(index)) continue;
      layers_.push_back(index);
      if (!tensors_.is_whole()) continue;
      const GgufDemands demands = rules.demands_of(index);
      find_layer_tensors(tensors_, index, model_.sizes, demands);
      used_.merge(find_tensors_so_far(tensors_, index, model_.sizes, demands).used);
    }
  }

  bool put(std::string_view name, const ConstTensorView& tensor, FeedMemory memory) override {
    io::check_gguf_name(name, kFedName);
    const io::GgufType& type = type_of_values(name, tensor.dtype);
    check_fed_tensor(std::string(name), tensor, memory);
    Fed* const fed = take(describe(name, type, tensor.shape));
    if (fed == nullptr) return false;
    const auto bytes = static_cast<size_t>(fed->tensor.bytes);
    if (memory == FeedMemory::kCopy) {
      own(*fed, copy_dense(tensor, bytes));
    } else {
      keep(*fed, {static_cast<const std::byte*>(tensor.data), bytes});
    }
    return true;
  }

  bool put(std::string_view name, const GgufTensorView& tensor, FeedMemory memory) override {
    io::check_gguf_name(name, kFedName);
    const io::GgufType& type = io::require_gguf_type(tensor.type, name, kFedName);
    io::GgufTensor described = describe(name, type, tensor.shape);
    if (tensor.bytes.data() == nullptr) {
      throw Error(ErrorCode::kNullPointer,
                  {.what = "a tensor without data", .tensor = described.name});
    }
    if (tensor.bytes.size() != described.bytes) {
      throw Error(ErrorCode::kShape, {.what = "the tensor has another number of bytes",
                                      .tensor = described.name,
                                      .expected = fmt::format("{} bytes of {}", described.bytes,
                                                              io::describe_tensor(described)),
                                      .found = fmt::format("{} bytes", tensor.bytes.size())});
    }
    Fed* const fed = take(std::move(described));
    if (fed == nullptr) return false;
    if (memory == FeedMemory::kCopy) {
      own(*fed, {tensor.bytes.begin(), tensor.bytes.end()});
    } else {
      keep(*fed, tensor.bytes);
    }
    return true;
  }

  std::span<const int64_t> layers() const noexcept override { return layers_; }

  std::vector<std::string> missing(size_t limit) const override {
    const GgufLayerRules rules(model_, tensors_);
    std::vector<std::string> names;
    for (const int64_t layer : layers_) {
      if (names.size() >= limit) break;
      for (const GgufLayerSoFar::Missing& missing : missing_of(rules, layer)) {
        if (names.size() < limit) names.push_back(missing.name + " " + missing.dims);
      }
    }
    return names;
  }

  bool is_complete(int64_t layer) const override {
    check_layer(layer);
    return missing_of(GgufLayerRules(model_, tensors_), layer).empty();
  }

  CheckpointLayer layer(int64_t index) const override {
    const Mapped& mapped = map(index);
    return describe_gguf_layer(model_, mapped.layer, mapped.form);
  }

  std::unique_ptr<WeightSource> layer_source(int64_t index) const override {
    const Mapped& mapped = map(index);
    return std::make_unique<GgufSource>(mapped.layer, mapped.form);
  }

  void release(int64_t layer) override {
    check_layer(layer);
    std::vector<const Fed*> dropped;
    for (auto& [name, fed] : fed_) {
      if (gguf_layer_of(name) != layer) continue;
      if (!fed.is_listed) dropped.push_back(&fed);
      fed.owned = {};
      tensors_.put({.tensor = &fed.tensor});
    }
    for (const Fed* fed : dropped) drop(*fed);
    maps_.erase(layer);
    outdated_.erase(layer);
  }

 private:
  struct Fed {
    io::GgufTensor tensor;
    bool is_listed = false;             // by the header
    std::vector<std::byte> owned = {};  // unless the caller keeps the bytes
  };
  struct Mapped {
    GgufLayer layer;
    GgufForm form;
  };

  void check_layer(int64_t index) const {
    if (!std::ranges::binary_search(layers_, index)) reject_layer(layers_, index);
  }

  Fed& add(io::GgufTensor tensor, bool is_listed) {
    std::string name = tensor.name;
    Fed& fed = fed_[std::move(name)];
    fed = {.tensor = std::move(tensor), .is_listed = is_listed};
    tensors_.put({.tensor = &fed.tensor});
    return fed;
  }
  void list(io::GgufTensor tensor) {
    if (gguf_layer_of(tensor.name) >= 0) add(std::move(tensor), true);
  }
  void drop(const Fed& fed) {
    const std::string name = fed.tensor.name;
    tensors_.remove(name);
    fed_.erase(name);
  }

  void own(Fed& fed, std::vector<std::byte> bytes) {
    fed.owned = std::move(bytes);
    keep(fed, fed.owned);
  }
  void keep(Fed& fed, std::span<const std::byte> bytes) {
    const int64_t layer = gguf_layer_of(fed.tensor.name);
    tensors_.put({.tensor = &fed.tensor, .bytes = bytes});
    const auto mapped = maps_.find(layer);
    if (mapped == maps_.end()) return;
    outdated_.emplace(layer, std::move(mapped->second));
    maps_.erase(mapped);
  }

  GgufPlace place_of(int64_t layer, std::string_view name) const {
    return tensors_.find(layer, name.substr(gguf_layer_prefix(layer).size()));
  }

  // Says where the tensor's bytes go; null if no layer has a use for it.
  Fed* take(io::GgufTensor tensor) {
    const int64_t layer = gguf_layer_of(tensor.name);
    if (layer < 0 || layer >= model_.num_hidden_layers) return nullptr;
    if (!place_of(layer, tensor.name).bytes.empty()) {
      throw Error(ErrorCode::kTensorDuplicate,
                  {.what = "a tensor of this name was put before", .tensor = tensor.name});
    }
    const auto known = fed_.find(tensor.name);
    if (known != fed_.end() && known->second.is_listed) {
      const bool is_used = tensors_.is_whole() ? used_.contains(tensor.name)
                                               : use_of(known->second, layer) != nullptr;
      if (!is_used) return nullptr;
      check_listed(known->second.tensor, tensor);
      return &known->second;
    }
    if (tensors_.is_whole()) {
      check_not_of_experts(tensor, layer);
      return nullptr;
    }
    Fed& fed = add(std::move(tensor), false);
    return use_of(fed, layer);
  }

  void check_not_of_experts(const io::GgufTensor& tensor, int64_t layer) const {
    const std::string_view rest =
        std::string_view(tensor.name).substr(gguf_layer_prefix(layer).size());
    if (!std::ranges::binary_search(layers_, layer) || !belongs_to_experts(rest)) return;
    throw Error(ErrorCode::kTensorUnexpected,
                {.what = "the header does not list this tensor of its experts",
                 .file = kGgufHeaderName,
                 .tensor = tensor.name,
                 .found = io::describe_tensor(tensor)});
  }

  // The tensor, which the table has, if its layer has a use for it; null otherwise. Forgets one
  // that is not listed and that is refused or has none.
  Fed* use_of(Fed& fed, int64_t layer) {
    const std::string_view rest =
        std::string_view(fed.tensor.name).substr(gguf_layer_prefix(layer).size());
    try {
      const GgufLayerRules rules(model_, tensors_);
      const bool has_experts = rules.has_experts(layer);
      const bool is_used = !rules.is_dense_by_key(layer) &&
                           check_beside_others(rules, fed.tensor, layer).contains(fed.tensor.name);
      update_layers(layer, has_experts, !is_used && tells_that_layer_is_dense(rest));
      if (is_used) return &fed;
    } catch (...) {
      if (!fed.is_listed) drop(fed);
      throw;
    }
    if (!fed.is_listed && !tells_that_layer_is_dense(rest)) drop(fed);
    return nullptr;
  }

  // The names that the layer uses, of what has come of it. Errors are those of the last tensor,
  // since the others were accepted before.
  std::set<std::string_view> check_beside_others(const GgufLayerRules& rules,
                                                 const io::GgufTensor& last, int64_t layer) const {
    try {
      return find_tensors_so_far(tensors_, layer, model_.sizes, rules.demands_of(layer)).used;
    } catch (const Error& error) {
      const ErrorDetail& detail = error.detail();
      if (detail.tensor == last.name || !detail.tensor.starts_with(gguf_layer_prefix(layer))) throw;
      throw Error(error.code(),
                  {.what = fmt::format("the tensor does not fit {}, which was put before or is "
                                       "listed, or the reverse: {}",
                                       detail.tensor, detail.what),
                   .file = detail.file,
                   .tensor = last.name,
                   .expected = fmt::format("{} of {}", detail.expected, detail.tensor),
                   .found = fmt::format("{}, beside {}", detail.found, io::describe_tensor(last)),
                   .hint = detail.hint});
    }
  }

  void update_layers(int64_t layer, bool has_experts, bool is_dense) {
    const auto at = std::ranges::lower_bound(layers_, layer);
    const bool is_there = at != layers_.end() && *at == layer;
    if (has_experts && !is_there) layers_.insert(at, layer);
    if (!has_experts && is_dense && is_there) layers_.erase(at);
  }

  std::vector<GgufLayerSoFar::Missing> missing_of(const GgufLayerRules& rules,
                                                  int64_t layer) const {
    GgufLayerSoFar found =
        find_tensors_so_far(tensors_, layer, model_.sizes, rules.demands_of(layer));
    for (const std::string_view name : found.used) {
      const GgufPlace place = place_of(layer, name);
      if (!place.bytes.empty()) continue;
      found.missing.push_back({.name = std::string(name), .dims = shape_text(*place.tensor)});
    }
    return std::move(found.missing);
  }

  const Mapped& map(int64_t index) const {
    check_layer(index);
    const GgufLayerRules rules(model_, tensors_);
    const std::vector<GgufLayerSoFar::Missing> missing = missing_of(rules, index);
    if (!missing.empty()) {
      throw Error(
          ErrorCode::kTensorMissing,
          {.what = fmt::format("{} tensors of layer {} have not come", missing.size(), index),
           .file = kFedName,
           .tensor = missing.front().name,
           .expected = missing.front().dims});
    }
    std::unique_ptr<Mapped>& mapped = maps_[index];
    if (mapped == nullptr) {
      GgufLayer found = find_layer_tensors(tensors_, index, model_.sizes, rules.demands_of(index));
      const GgufForm form = form_of(found);
      mapped = std::make_unique<Mapped>(Mapped{.layer = std::move(found), .form = form});
    }
    return *mapped;
  }

  FedHeader header_;
  GgufModel model_;
  GgufTensorTable tensors_;
  std::map<std::string, Fed> fed_;  // what the table's places point to
  std::vector<int64_t> layers_;
  std::set<std::string_view> used_;                          // by all layers, if the list is whole
  mutable std::map<int64_t, std::unique_ptr<Mapped>> maps_;  // complete layers
  // Layers that one more tensor came for: sources made before still read them.
  std::multimap<int64_t, std::unique_ptr<Mapped>> outdated_;
};

}  // namespace

std::unique_ptr<FeedContents> feed_of_gguf(
    std::span<const std::byte> header, std::span<const std::span<const std::byte>> other_parts) {
  return std::make_unique<GgufFeed>(read_fed_header(header, other_parts));
}

}  // namespace conclave::inline v0::checkpoint
