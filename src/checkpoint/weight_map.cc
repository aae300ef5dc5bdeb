#include "checkpoint/weight_map.h"

#include "io/directory.h"
#include "io/text.h"

#include "conclave/error.h"

#include <algorithm>
#include <set>
#include <string_view>

namespace conclave::inline v0::checkpoint {
namespace {

io::JsonValue find_weight_map(const io::JsonValue& root) {
  const auto weights = root.is_object() ? root.find_set("weight_map") : std::nullopt;
  if (!weights || !weights->is_object()) {
    throw Error(ErrorCode::kIndexNoWeightMap,
                {.what = "the index has no weight map",
                 .file = root.file(),
                 .expected = "{\"weight_map\": {\"TENSOR\": \"SHARD.safetensors\", ...}}",
                 .found = weights ? "weight_map is " + std::string(io::to_string(weights->type()))
                                  : "no key weight_map"});
  }
  if (weights->size() == 0) {
    throw Error(
        ErrorCode::kIndexNoWeightMap,
        {.what = "the index lists no tensor", .file = root.file(), .found = "an empty weight_map"});
  }
  return *weights;
}

void check_shard_of(std::string_view tensor, std::string_view shard, const std::string& file) {
  try {
    io::check_shard_name(shard, file);
  } catch (const Error& error) {
    // Naming the tensor helps to find the line.
    ErrorDetail detail = error.detail();
    detail.tensor = io::show_name(tensor);
    if (detail.hint.empty()) {
      detail.hint = "the index is damaged or hostile: nothing outside the directory was opened";
    }
    throw Error(error.code(), std::move(detail));
  }
}

}  // namespace

WeightMap read_weight_map(const io::JsonDocument& document) {
  WeightMap map{
      .file = document.root().file(), .tensors = find_weight_map(document.root()), .shards = {}};
  std::set<std::string_view> known;
  for (const io::JsonMember& member : map.tensors.members()) {
    const std::string_view shard = member.value.as_string();
    if (!known.insert(shard).second) continue;
    check_shard_of(member.key, shard, map.file);
    map.shards.emplace_back(shard);
  }
  std::sort(map.shards.begin(), map.shards.end());
  return map;
}

}  // namespace conclave::inline v0::checkpoint
