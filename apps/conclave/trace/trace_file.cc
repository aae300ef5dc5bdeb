#include "trace/trace_file.h"

#include "conclave/error.h"
#include "conclave/version.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

namespace conclave::tool {
namespace {

constexpr std::string_view kFormat = "conclave.routing_trace";
constexpr std::string_view kVersion = "1";
constexpr std::string_view kPrefix = "layers.";
constexpr std::string_view kIds = ".topk_ids";
constexpr std::string_view kWeights = ".topk_weights";

// Larger numbers are no sizes of any model, and could overflow products.
constexpr int64_t kMostExperts = int64_t{1} << 24;
constexpr int64_t kMostTokens = int64_t{1} << 40;
constexpr int64_t kMostLayers = 65536;

std::string tensor_name(int64_t layer, std::string_view suffix) {
  return fmt::format("{}{}{}", kPrefix, layer, suffix);
}

// Text of a file that may hold anything, fit to be shown: quoted, in ASCII, and short.
std::string shown(std::string_view text) {
  constexpr size_t kMost = 60;
  const nlohmann::json quoted = std::string(text.substr(0, kMost));
  return quoted.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace) +
         (text.size() > kMost ? "..." : "");
}

std::optional<int64_t> whole_number(std::string_view text) {
  int64_t value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

class Metadata {
 public:
  Metadata(const std::map<std::string, std::string>& values, const std::string& file)
      : values_(values), file_(file) {}

  const std::string& text(const std::string& key) const {
    const auto found = values_.find(key);
    if (found != values_.end()) return found->second;
    throw Error(ErrorCode::kConfigMissingKey, {.what = "the trace lacks a key of its metadata",
                                               .file = file_,
                                               .tensor = key,
                                               .hint = "conclave run --trace writes such files"});
  }
  std::string text_or(const std::string& key, const std::string& other) const {
    const auto found = values_.find(key);
    return found == values_.end() ? other : found->second;
  }
  void require(const std::string& key, std::string_view expected) const {
    if (text(key) != expected) refuse(key, fmt::format("\"{}\"", expected), text(key));
  }
  int64_t number(const std::string& key, int64_t lowest, int64_t highest) const {
    const std::optional<int64_t> value = whole_number(text(key));
    if (value && *value >= lowest && *value <= highest) return *value;
    refuse(key, fmt::format("a whole number from {} to {}", lowest, highest), text(key));
  }
  int64_t number_or(const std::string& key, int64_t other, int64_t highest) const {
    return values_.contains(key) ? number(key, 0, highest) : other;
  }
  [[noreturn]] void refuse(const std::string& key, std::string expected,
                           const std::string& found) const {
    throw Error(ErrorCode::kConfigValue, {.what = "the trace's metadata has a wrong value",
                                          .file = file_,
                                          .tensor = key,
                                          .expected = std::move(expected),
                                          .found = shown(found)});
  }

 private:
  const std::map<std::string, std::string>& values_;
  const std::string& file_;
};

std::vector<int64_t> batches_of(const Metadata& metadata, int64_t num_tokens) {
  std::vector<int64_t> begins;
  const std::string& text = metadata.text("batches");
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::optional<int64_t> begin =
        whole_number(std::string_view(text).substr(at, comma - at));
    const bool first = begins.empty();
    const int64_t least = first ? 0 : begins.back() + 1;
    const bool fits = begin && *begin >= least && (first ? *begin == 0 : *begin < num_tokens);
    if (!fits) {
      metadata.refuse("batches",
                      fmt::format("first tokens of batches, ascending from 0 below {}", num_tokens),
                      text);
    }
    begins.push_back(*begin);
    at = comma + 1;
  }
  return begins;
}

// The number in layers.N.topk_ids, or in layers.N.topk_weights.
std::optional<int64_t> layer_of(std::string_view name, std::string_view suffix) {
  if (!name.starts_with(kPrefix) || !name.ends_with(suffix)) return std::nullopt;
  if (name.size() <= kPrefix.size() + suffix.size()) return std::nullopt;
  const std::string_view number =
      name.substr(kPrefix.size(), name.size() - kPrefix.size() - suffix.size());
  const std::optional<int64_t> layer = whole_number(number);
  const bool plain =
      layer && *layer >= 0 && *layer < kMostLayers && std::to_string(*layer) == number;
  return plain ? layer : std::nullopt;
}

void check_tensor(const TensorInfo& tensor, DType dtype, const TraceInfo& info,
                  const std::string& file) {
  const std::vector<int64_t> shape = {info.num_tokens, info.top_k};
  const auto text = [](const std::vector<int64_t>& dims) {
    return fmt::format("[{}]", fmt::join(dims, ", "));
  };
  if (tensor.shape != shape) {
    throw Error(ErrorCode::kTensorShape, {.what = "a tensor of the trace has the wrong shape",
                                          .file = file,
                                          .tensor = tensor.name,
                                          .expected = text(shape) + " (tokens x choices)",
                                          .found = text(tensor.shape)});
  }
  if (tensor.dtype != dtype) {
    throw Error(ErrorCode::kTensorDType, {.what = "a tensor of the trace has the wrong type",
                                          .file = file,
                                          .tensor = tensor.name,
                                          .expected = std::string(to_string(dtype)),
                                          .found = std::string(to_string(tensor.dtype))});
  }
}

std::map<std::string, std::string> metadata_of(const TraceInfo& info) {
  return {{"format", std::string(kFormat)},
          {"version", std::string(kVersion)},
          {"made_by", fmt::format("conclave {}", build_info().version)},
          {"model", info.model},
          {"model_type", info.model_type},
          {"num_experts", std::to_string(info.num_experts)},
          {"num_zero_experts", std::to_string(info.num_zero_experts)},
          {"top_k", std::to_string(info.top_k)},
          {"num_tokens", std::to_string(info.num_tokens)},
          {"batches", fmt::format("{}", fmt::join(info.batch_begin, ","))}};
}

}  // namespace

TraceWriter::TraceWriter(const std::filesystem::path& path, const TraceInfo& info,
                         TraceWeights weights)
    : writer_(path, metadata_of(info)), top_k_(info.top_k), weights_(weights) {
  for (const int64_t layer : info.layers) {
    writer_.declare(tensor_name(layer, kIds), DType::kI32, {info.num_tokens, info.top_k});
    if (weights_ == TraceWeights::kNo) continue;
    writer_.declare(tensor_name(layer, kWeights), DType::kF32, {info.num_tokens, info.top_k});
  }
  // The file is made now, so that a path that cannot be written fails before any work.
  writer_.write({});
}

void TraceWriter::write(const ConstTensorView& ids, const ConstTensorView& weights) {
  write_rows(ids);
  if (weights_ == TraceWeights::kYes) write_rows(weights);
}

void TraceWriter::write_rows(const ConstTensorView& rows) {
  const int64_t slots = rows.shape[1];
  const auto* bytes = static_cast<const std::byte*>(rows.data);
  const auto element = static_cast<size_t>(bit_size(rows.dtype) / 8);
  const size_t kept = static_cast<size_t>(top_k_) * element;
  if (slots == top_k_) {
    writer_.write({bytes, static_cast<size_t>(rows.shape[0]) * kept});
    return;
  }
  // Slots of fused shared experts follow those that the router chose.
  for (int64_t token = 0; token < rows.shape[0]; ++token) {
    writer_.write({bytes + static_cast<size_t>(token * slots) * element, kept});
  }
}

TraceInfo read_trace_info(std::span<const TensorInfo> tensors,
                          const std::map<std::string, std::string>& values,
                          const std::string& file) {
  const Metadata metadata(values, file);
  metadata.require("format", kFormat);
  metadata.require("version", kVersion);
  TraceInfo info;
  info.model = metadata.text_or("model", "");
  info.model_type = metadata.text_or("model_type", "");
  info.num_experts = metadata.number("num_experts", 1, kMostExperts);
  info.num_zero_experts = metadata.number_or("num_zero_experts", 0, kMostExperts);
  info.top_k = metadata.number("top_k", 1, info.num_experts + info.num_zero_experts);
  info.num_tokens = metadata.number("num_tokens", 0, kMostTokens);
  info.batch_begin = batches_of(metadata, info.num_tokens);
  for (const TensorInfo& tensor : tensors) {
    if (const std::optional<int64_t> layer = layer_of(tensor.name, kIds)) {
      check_tensor(tensor, DType::kI32, info, file);
      info.layers.push_back(*layer);
    } else if (layer_of(tensor.name, kWeights)) {
      check_tensor(tensor, DType::kF32, info, file);
    } else {
      throw Error(ErrorCode::kTensorUnexpected,
                  {.what = "the trace has a tensor of another name",
                   .file = file,
                   .expected = "layers.N.topk_ids or layers.N.topk_weights",
                   .found = shown(tensor.name)});
    }
  }
  if (info.layers.empty()) {
    throw Error(
        ErrorCode::kTensorMissing,
        {.what = "the trace has no layer", .file = file, .expected = "layers.N.topk_ids, [T, k]"});
  }
  std::ranges::sort(info.layers);
  return info;
}

void check_trace_ids(std::span<const int32_t> ids, const TraceInfo& info, int64_t layer,
                     const std::string& file) {
  const int64_t limit = info.num_experts + info.num_zero_experts;
  const auto wrong =
      std::ranges::find_if(ids, [limit](int32_t id) { return id < -1 || id >= limit; });
  if (wrong == ids.end()) return;
  const int64_t at = wrong - ids.begin();
  throw Error(ErrorCode::kExpertId,
              {.what = fmt::format("the trace names an expert that the layer has not (token {}, "
                                   "choice {})",
                                   at / info.top_k, at % info.top_k),
               .file = file,
               .tensor = tensor_name(layer, kIds),
               .expected = fmt::format("-1 to {}", limit - 1),
               .found = std::to_string(*wrong)});
}

TraceFile::TraceFile(SafetensorsFile file)
    : RoutingTrace(read_trace_info(file.tensors(), file.metadata(), file.path().string())),
      file_(std::move(file)) {}

TraceFile TraceFile::open(const std::filesystem::path& path) {
  TraceFile trace(SafetensorsFile::open(path, FileAccess::kRead));
  trace.check_weights();
  return trace;
}

void TraceFile::check_weights() const {
  constexpr size_t kPiece = size_t{1} << 16;
  std::vector<float> piece(kPiece);
  for (const TensorInfo& tensor : file_.tensors()) {
    if (!layer_of(tensor.name, kWeights)) continue;
    for (uint64_t at = 0; at < tensor.bytes; at += kPiece * sizeof(float)) {
      const auto bytes =
          static_cast<size_t>(std::min<uint64_t>(kPiece * sizeof(float), tensor.bytes - at));
      const std::span<float> values = std::span(piece).first(bytes / sizeof(float));
      file_.read(tensor, at, std::as_writable_bytes(values));
      const auto wrong =
          std::ranges::find_if(values, [](float value) { return !std::isfinite(value); });
      if (wrong == values.end()) continue;
      const auto index = static_cast<int64_t>(at / sizeof(float)) + (wrong - values.begin());
      throw Error(ErrorCode::kTensorValue,
                  {.what = fmt::format("a weight of the trace is not finite (token {}, choice {})",
                                       index / info().top_k, index % info().top_k),
                   .file = file_.path().string(),
                   .tensor = tensor.name,
                   .found = fmt::format("{}", *wrong)});
    }
  }
}

std::vector<int32_t> TraceFile::ids(size_t position) const {
  const int64_t layer = info().layers.at(position);
  const TensorInfo& tensor = *file_.find(tensor_name(layer, kIds));
  std::vector<int32_t> ids(static_cast<size_t>(info().num_tokens * info().top_k));
  file_.read(tensor, 0, std::as_writable_bytes(std::span(ids)));
  check_trace_ids(ids, info(), layer, file_.path().string());
  return ids;
}

std::string TraceFile::describe() const {
  const bool one = info().batch_begin.size() == 1;
  return fmt::format("{} tokens in {} batch{} of {}", info().num_tokens, info().batch_begin.size(),
                     one ? "" : "es", file_.path().string());
}

}  // namespace conclave::tool
