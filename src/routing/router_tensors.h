// Tensors that only one router of the catalog reads. The router's row lists them; whoever stores,
// checks, counts, packs, uploads, draws or names weights goes through these lists and knows none of
// them.
#pragma once

#include "conclave/routing.h"
#include "conclave/spec.h"
#include "conclave/tensor.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace conclave::inline v0 {

struct RouteArgs;

namespace routing {

enum class RouterElement : uint8_t {
  kFloat,  // stored as f32, f16 or bf16; the router reads float
  kIndex,  // stored as int32 or int64; the router reads int32_t
};

struct RouterTensorSize {
  int64_t rows = 0;  // 0: the spec has no such tensor
  int64_t cols = 0;
};

template <class Views>
using FieldOf = ConstTensorView Views::*;

struct RouterTensor {
  std::string_view name;            // in messages and arguments
  std::optional<WeightId> id = {};  // weights::router_tensor(n); none: the spec holds the values
  RouterElement element = RouterElement::kFloat;
  RouterTensorSize (*size)(const MoeSpec& spec);
  bool is_vector = false;       // rows = 1 by definition; files store one axis
  bool is_optional = false;     // a source may leave it out; the router then reads null
  bool is_by_token_id = false;  // row i belongs to token id i, so that ids end at the rows

  // The values of a tensor without an id, for devices: as many elements as its size says.
  std::span<const std::byte> (*in_spec)(const MoeSpec& spec) = nullptr;

  // Throws Error for a value that the router cannot take. `rows` are some rows as stored, from
  // number `first_row` on; `where` names the tensor. Null: any value will do.
  void (*check)(const MoeSpec& spec, const ConstTensorView& rows, int64_t first_row,
                const std::string& where) = nullptr;

  // Random layers draw numbers around `mean`, and indices of [0, index_limit(spec)), which differ
  // within a row where that many exist.
  int64_t (*index_limit)(const MoeSpec& spec) = nullptr;
  float mean = 0;
  float deviation = 0.25F;

  // Names in checkpoints: a NamePattern::text of every family, and what follows "blk.N." in GGUF.
  std::string_view pattern = {};
  std::string_view gguf_name = {};
  std::string_view gguf_layers_key = {};  // says how many of the first layers have it
  // Sets what a GGUF file says by having the tensor with this many rows: the router and its sizes.
  void (*imply)(RouterSpec& router, int64_t rows) = nullptr;

  // Public structs have fields for some tensors; all others go by name.
  FieldOf<ExpertWeights> weights_field = nullptr;
  FieldOf<RouteArgs> call_field = nullptr;
  void (*publish)(RouterWeights& weights, const void* values) = nullptr;
};

// A row lists at most this many.
inline constexpr size_t kMaxTensorsOfRouter = std::tuple_size_v<decltype(RouterWeights::tensors)>;

// Every tensor with an id, of all rows.
std::span<const RouterTensor* const> all_router_tensors();
// The tensor with this id, or null.
const RouterTensor* find_router_tensor(WeightId id) noexcept;

// A tensor that the layer of a spec has.
struct SizedRouterTensor {
  const RouterTensor* tensor = nullptr;
  RouterTensorSize size = {};
  // Its place in the row of the spec's router; none for a router of the application, which may ask
  // for the tensors of any row.
  std::optional<size_t> place = {};

  int64_t num_elements() const { return size.rows * size.cols; }
};
std::vector<SizedRouterTensor> router_tensors_of(const MoeSpec& spec);

// A tensor among views: its own field if it has one, otherwise by name; empty if it is not there.
template <class Views>
ConstTensorView find_view(const Views& views, const std::map<std::string, ConstTensorView>& by_name,
                          FieldOf<Views> field, std::string_view name) {
  if (field != nullptr && !(views.*field).empty()) return views.*field;
  const auto found = by_name.find(std::string(name));
  return found != by_name.end() ? found->second : ConstTensorView{};
}

// Throws Error(kUnknownName) for a name of no router's tensor.
void check_router_tensor_names(const std::map<std::string, ConstTensorView>& by_name);

// Gives the router one of its tensors.
void set_router_tensor(const SizedRouterTensor& tensor, const void* values, RouterWeights& weights);

}  // namespace routing
}  // namespace conclave::inline v0
