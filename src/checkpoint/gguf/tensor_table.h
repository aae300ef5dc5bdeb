// The tensors of a GGUF model by layer, whether a file has them or a program.
#pragma once

#include "checkpoint/gguf/place.h"

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave::inline v0::checkpoint {

// Whether a model has no other tensors than those of a table, or more of them may come.
enum class GgufTensorList : uint8_t { kWhole, kSoFar };

class GgufTensorTable {
 public:
  // `origin` names where the tensors come from, for messages about one that is absent.
  GgufTensorTable(std::string origin, GgufTensorList list)
      : origin_(std::move(origin)), is_whole_(list == GgufTensorList::kWhole) {}
  // The tensors of all parts of a file, which must outlive it.
  explicit GgufTensorTable(const io::GgufFile& file);

  const std::string& origin() const noexcept { return origin_; }
  bool is_whole() const noexcept { return is_whole_; }

  // Takes a tensor of this name in the place of one that it has, if any. Tensors of no layer are
  // let be. The tensor must outlive this, or be removed.
  void put(const GgufPlace& place);
  void remove(std::string_view name);

  // The layer's tensors by name; empty if there are none.
  std::span<const GgufPlace> layer(int64_t index) const;
  // The tensor whose name is `rest` behind the layer's prefix; empty if there is none.
  GgufPlace find(int64_t index, std::string_view rest) const;
  // Any tensor of a router or of experts; empty if the layer has none.
  GgufPlace find_of_experts(int64_t index) const;

 private:
  std::string origin_;
  bool is_whole_ = true;
  // By prefixes such as "blk.3.".
  std::map<std::string, std::vector<GgufPlace>, std::less<>> layers_;
};

// Returns "blk.3.".
std::string gguf_layer_prefix(int64_t layer);
// The layer of a tensor by its name; -1 for tensors of none.
int64_t gguf_layer_of(std::string_view name);

// These take a name without the layer's prefix. "ffn_up.3.weight" is the matrix of one expert, in
// old files.
bool is_of_one_expert(std::string_view rest);
// Whether the tensor belongs to a router, routed or shared experts, and has a meaning here. Steps
// of quantised rows are what llama.cpp itself reads and never uses.
bool belongs_to_experts(std::string_view rest);

}  // namespace conclave::inline v0::checkpoint
