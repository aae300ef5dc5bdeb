// Records as safetensors: three tensors for each layer, what describes it in the metadata.
#include "io/text.h"
#include "record/rows.h"

#include "conclave/error.h"
#include "conclave/routing_record.h"
#include "conclave/safetensors.h"
#include "conclave/version.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0 {
namespace {

constexpr std::string_view kFormat = "conclave.routing_record";
constexpr std::string_view kVersion = "1";
constexpr std::string_view kTokens = "tokens";
constexpr std::string_view kIds = "topk_ids";
constexpr std::string_view kWeights = "topk_weights";
constexpr int64_t kMostLayers = 65536;

using Metadata = std::map<std::string, std::string>;

std::string key_of(int64_t layer, std::string_view name) {
  return fmt::format("layers.{}.{}", layer, name);
}

template <class Number>
std::optional<Number> number_in(std::string_view text, int base = 10) {
  Number number{};
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number, base);
  if (problem != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

// A file says this of itself.
class Reader {
 public:
  explicit Reader(const std::filesystem::path& path)
      : file_(SafetensorsFile::open(path, FileAccess::kRead)), name_(path.string()) {}

  RoutingRecord read() const {
    require("format", kFormat);
    require("version", kVersion);
    RoutingRecord record{
        .model = text_or("model", ""), .model_type = text_or("model_type", ""), .layers = {}};
    for (const int64_t layer : layers()) record.layers.push_back(rows(layer));
    record::check_record(record);
    return record;
  }

 private:
  [[noreturn]] void refuse(const std::string& key, std::string expected) const {
    throw Error(ErrorCode::kConfigValue, {.what = "the record has a value that cannot be",
                                          .file = name_,
                                          .tensor = key,
                                          .expected = std::move(expected),
                                          .found = io::show_text(text(key))});
  }
  const std::string& text(const std::string& key) const {
    const auto found = file_.metadata().find(key);
    if (found != file_.metadata().end()) return found->second;
    throw Error(ErrorCode::kConfigMissingKey,
                {.what = "the record lacks a key of its metadata",
                 .file = name_,
                 .tensor = key,
                 .hint = "RoutingRecorder and conclave run --record-routing write such files"});
  }
  std::string text_or(const std::string& key, const std::string& other) const {
    return file_.metadata().contains(key) ? text(key) : other;
  }
  void require(const std::string& key, std::string_view expected) const {
    if (text(key) != expected) refuse(key, fmt::format("\"{}\"", expected));
  }
  int64_t number(const std::string& key, int64_t low, int64_t high) const {
    const auto value = number_in<int64_t>(text(key));
    if (!value || *value < low || *value > high) {
      refuse(key, fmt::format("a whole number from {} to {}", low, high));
    }
    return *value;
  }

  // The layers whose ids are there, once every tensor has a name of ours.
  std::set<int64_t> layers() const {
    std::set<int64_t> layers;
    for (const TensorInfo& tensor : file_.tensors()) layers.insert(layer_of(tensor.name));
    return layers;
  }
  int64_t layer_of(const std::string& name) const {
    constexpr std::string_view kPrefix = "layers.";
    const std::string_view rest =
        name.starts_with(kPrefix) ? std::string_view(name).substr(kPrefix.size()) : "";
    const size_t dot = rest.find('.');
    const auto layer = number_in<int64_t>(rest.substr(0, std::min(dot, rest.size())));
    const std::string_view what = dot == std::string_view::npos ? "" : rest.substr(dot + 1);
    const bool known = what == kTokens || what == kIds || what == kWeights;
    if (layer && *layer >= 0 && *layer < kMostLayers && known && name == key_of(*layer, what)) {
      return *layer;
    }
    throw Error(ErrorCode::kTensorUnexpected,
                {.what = "the record has a tensor of another name",
                 .file = name_,
                 .expected = "layers.N.tokens, layers.N.topk_ids or layers.N.topk_weights",
                 .found = io::show_name(name)});
  }

  const TensorInfo& tensor(int64_t layer, std::string_view name, DType dtype,
                           std::vector<int64_t> shape) const {
    const std::string key = key_of(layer, name);
    const TensorInfo* const found = file_.find(key);
    if (found == nullptr) {
      throw Error(ErrorCode::kTensorMissing,
                  {.what = "the record lacks a tensor", .file = name_, .tensor = key});
    }
    if (found->dtype != dtype) {
      throw Error(ErrorCode::kTensorDType, {.what = "a tensor of the record has the wrong type",
                                            .file = name_,
                                            .tensor = key,
                                            .expected = std::string(to_string(dtype)),
                                            .found = std::string(to_string(found->dtype))});
    }
    const auto fits = [](int64_t size, int64_t wanted) { return wanted < 0 || size == wanted; };
    if (!std::ranges::equal(found->shape, shape, fits)) {
      throw Error(ErrorCode::kTensorShape,
                  {.what = "a tensor of the record has the wrong shape",
                   .file = name_,
                   .tensor = key,
                   .expected = fmt::format("[{}], -1 being any number", fmt::join(shape, ", ")),
                   .found = fmt::format("[{}]", fmt::join(found->shape, ", "))});
    }
    return *found;
  }

  template <class Element>
  std::vector<Element> load(const TensorInfo& tensor) const {
    std::vector<Element> values(static_cast<size_t>(tensor.bytes / sizeof(Element)));
    if (!values.empty()) file_.read(tensor, 0, std::as_writable_bytes(std::span(values)));
    return values;
  }

  RecordedRows rows(int64_t layer) const {
    const TensorInfo& ids = tensor(layer, kIds, DType::kI32, {-1, -1});
    const int64_t count = ids.shape[0];
    const int64_t slots = ids.shape[1];
    if (slots < 1) refuse_slots(ids);
    const TensorInfo& tokens = tensor(layer, kTokens, DType::kI64, {count, 2});
    const TensorInfo& weights = tensor(layer, kWeights, DType::kF32, {count, slots});
    RecordedRows rows;
    rows.layer = {.layer = layer,
                  .num_ids = number(key_of(layer, "num_ids"), 1, int64_t{1} << 24),
                  .num_slots = slots,
                  .spec_hash = hash_of(layer)};
    rows.topk_ids = load<int32_t>(ids);
    rows.topk_weights = load<float>(weights);
    rows.dropped_tokens =
        number(key_of(layer, "dropped_tokens"), 0, std::numeric_limits<int64_t>::max());
    const std::vector<int64_t> keys = load<int64_t>(tokens);
    for (size_t at = 0; at < keys.size(); at += 2) rows.tokens.push_back({keys[at], keys[at + 1]});
    check_ids(rows);
    return rows;
  }
  [[noreturn]] void refuse_slots(const TensorInfo& ids) const {
    throw Error(ErrorCode::kTensorShape,
                {.what = "a layer of the record has no slots",
                 .file = name_,
                 .tensor = ids.name,
                 .expected = "[T, k], k at least 1",
                 .found = fmt::format("[{}]", fmt::join(ids.shape, ", "))});
  }
  uint64_t hash_of(int64_t layer) const {
    const std::string key = key_of(layer, "spec_hash");
    const auto hash = number_in<uint64_t>(text(key), 16);
    if (!hash) refuse(key, "up to 16 hexadecimal digits");
    return *hash;
  }
  void check_ids(const RecordedRows& rows) const {
    const int64_t limit = rows.layer.num_ids;
    const auto wrong =
        std::ranges::find_if(rows.topk_ids, [limit](int32_t id) { return id < -1 || id >= limit; });
    if (wrong == rows.topk_ids.end()) return;
    const int64_t at = wrong - rows.topk_ids.begin();
    throw Error(ErrorCode::kExpertId,
                {.what = fmt::format("the record names an expert that the layer has not (row {}, "
                                     "slot {})",
                                     at / rows.layer.num_slots, at % rows.layer.num_slots),
                 .file = name_,
                 .tensor = key_of(rows.layer.layer, kIds),
                 .found = std::to_string(*wrong),
                 .limit = fmt::format("-1 to {}", limit - 1)});
  }

  SafetensorsFile file_;
  std::string name_;
};

Metadata metadata_of(const RoutingRecord& record) {
  Metadata metadata{{"format", std::string(kFormat)},
                    {"version", std::string(kVersion)},
                    {"made_by", fmt::format("conclave {}", build_info().version)},
                    {"model", record.model},
                    {"model_type", record.model_type}};
  for (const RecordedRows& rows : record.layers) {
    const int64_t layer = rows.layer.layer;
    metadata[key_of(layer, "num_ids")] = std::to_string(rows.layer.num_ids);
    metadata[key_of(layer, "spec_hash")] = fmt::format("{:016x}", rows.layer.spec_hash);
    metadata[key_of(layer, "dropped_tokens")] = std::to_string(rows.dropped_tokens);
  }
  return metadata;
}

}  // namespace

RoutingRecord RoutingRecord::open(const std::filesystem::path& path) { return Reader(path).read(); }

void RoutingRecord::write(const std::filesystem::path& path) const {
  static_assert(sizeof(TokenKey) == 2 * sizeof(int64_t));
  record::check_record(*this);
  SafetensorsWriter writer(path, metadata_of(*this));
  for (const RecordedRows& rows : layers) {
    const int64_t layer = rows.layer.layer;
    const int64_t count = rows.num_tokens();
    writer.declare(key_of(layer, kTokens), DType::kI64, {count, 2});
    writer.declare(key_of(layer, kIds), DType::kI32, {count, rows.layer.num_slots});
    writer.declare(key_of(layer, kWeights), DType::kF32, {count, rows.layer.num_slots});
  }
  for (const RecordedRows& rows : layers) {
    writer.write(std::as_bytes(std::span(rows.tokens)));
    writer.write(std::as_bytes(std::span(rows.topk_ids)));
    writer.write(std::as_bytes(std::span(rows.topk_weights)));
  }
  writer.finish();
}

const RecordedRows* RoutingRecord::find(int64_t layer) const noexcept {
  const auto found = std::ranges::find_if(
      layers, [layer](const RecordedRows& rows) { return rows.layer.layer == layer; });
  return found != layers.end() ? &*found : nullptr;
}

}  // namespace conclave::inline v0
