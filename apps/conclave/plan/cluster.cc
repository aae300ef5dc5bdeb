#include "plan/cluster.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace conclave::tool {
namespace {

constexpr int32_t kMostNodes = 65536;
constexpr int32_t kMostGpusPerNode = 1024;
constexpr int64_t kMostGpus = 65536;
constexpr uint64_t kMostJsonBytes = uint64_t{1} << 20;
constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// Peaks are as published; links of an H200 are measured (bench/results/h200), and an H100 is taken
// to have the same ones. Nobody has measured a network here.
constexpr double kNetworkGbps = 45;
constexpr double kNetworkMicroseconds = 10;
constexpr double kNetworkPeerMicroseconds = 0.5;

Cluster h200() {
  return {.gpu = "h200",
          .memory_gb = 149,
          .memory_tbps = 4.8,
          .tensor16_tflops = 989,
          .tensor8_tflops = 1979,
          .float32_tflops = 67,
          .link_gbps = 395,
          .link_us = 9.5,
          .network_gbps = kNetworkGbps,
          .network_us = kNetworkMicroseconds,
          .network_peer_us = kNetworkPeerMicroseconds};
}

Cluster h100() {
  Cluster cluster = h200();
  cluster.gpu = "h100";
  cluster.memory_gb = 85;
  cluster.memory_tbps = 3.35;
  return cluster;
}

Cluster custom() {
  Cluster cluster{.gpu = "custom"};
  cluster.memory_gb = cluster.memory_tbps = cluster.tensor16_tflops = kUnknown;
  cluster.tensor8_tflops = cluster.float32_tflops = kUnknown;
  cluster.link_gbps = cluster.link_us = kUnknown;
  cluster.network_gbps = cluster.network_us = cluster.network_peer_us = kUnknown;
  return cluster;
}

struct Kind {
  std::string_view name;
  Cluster (*make)();
};
constexpr std::array kKinds = {Kind{"h200", h200}, Kind{"h100", h100}, Kind{"custom", custom}};

struct Rate {
  std::string_view key;
  double Cluster::*member;
  bool of_network;
};
constexpr std::array kRates = {Rate{"memory_gb", &Cluster::memory_gb, false},
                               Rate{"memory_tbps", &Cluster::memory_tbps, false},
                               Rate{"tensor16_tflops", &Cluster::tensor16_tflops, false},
                               Rate{"tensor8_tflops", &Cluster::tensor8_tflops, false},
                               Rate{"float32_tflops", &Cluster::float32_tflops, false},
                               Rate{"link_gbps", &Cluster::link_gbps, false},
                               Rate{"link_us", &Cluster::link_us, false},
                               Rate{"network_gbps", &Cluster::network_gbps, true},
                               Rate{"network_us", &Cluster::network_us, true},
                               Rate{"network_peer_us", &Cluster::network_peer_us, true}};

std::string kind_names() {
  std::string names;
  for (const Kind& kind : kKinds) {
    names += fmt::format("{}{}", names.empty() ? "" : ", ", kind.name);
  }
  return names;
}

// On the command line sizes and kind stand before the keys.
std::string key_names(bool of_a_file) {
  std::string names = of_a_file ? "nodes, gpus, gpu" : "";
  for (const Rate& rate : kRates) names += fmt::format("{}{}", names.empty() ? "" : ", ", rate.key);
  return names;
}

// Names the place of a description, for its errors.
struct Origin {
  std::string file;  // empty: the command line

  [[noreturn]] void refuse(std::string what, std::string key, std::string expected,
                           std::string found) const {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = std::move(what),
                 .file = file,
                 .tensor = key.empty() ? "--cluster" : "--cluster " + key,
                 .expected = std::move(expected),
                 .found = std::move(found)});
  }
};

Cluster cluster_of_kind(std::string_view name, const Origin& origin) {
  for (const Kind& kind : kKinds) {
    if (kind.name == name) return kind.make();
  }
  origin.refuse("unknown kind of GPU", "gpu", "one of " + kind_names(), fmt::format("'{}'", name));
}

void set_rate(Cluster& cluster, std::string_view key, double value, const Origin& origin) {
  const auto rate = std::ranges::find(kRates, key, &Rate::key);
  if (rate == kRates.end()) {
    origin.refuse("the description of the cluster has no such key", std::string(key),
                  "one of " + key_names(!origin.file.empty()), fmt::format("'{}'", key));
  }
  constexpr double kMost = 1e9;
  if (!(std::isfinite(value) && value > 0 && value <= kMost)) {
    origin.refuse("a rate of the cluster is out of range", std::string(key),
                  fmt::format("above 0, at most {:.0f}", kMost), fmt::format("{}", value));
  }
  cluster.*rate->member = value;
}

void check(const Cluster& cluster, const Origin& origin) {
  const auto range = [&](const char* key, int64_t value, int64_t most) {
    if (value >= 1 && value <= most) return;
    origin.refuse("a size of the cluster is out of range", key, fmt::format("1 to {}", most),
                  std::to_string(value));
  };
  range("nodes", cluster.nodes, kMostNodes);
  range("gpus", cluster.gpus_per_node, kMostGpusPerNode);
  const int64_t gpus = int64_t{cluster.nodes} * cluster.gpus_per_node;
  range("nodes x gpus", gpus, kMostGpus);
  for (const Rate& rate : kRates) {
    if (!std::isnan(cluster.*rate.member) || (rate.of_network && cluster.nodes == 1)) continue;
    origin.refuse("a GPU of the kind custom needs every key", std::string(rate.key), "a number",
                  "nothing");
  }
}

int32_t whole_number(std::string_view text, const char* key, const Origin& origin) {
  int32_t value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem == std::errc() && end == text.data() + text.size()) return value;
  origin.refuse("no description of a cluster", key,
                "[NODESx]GPUS:KIND, such as 2x8:h200, or a JSON file", fmt::format("'{}'", text));
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(separator, at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

Cluster parse_text(std::string_view text) {
  const Origin origin;
  const std::vector<std::string_view> parts = split(text, ',');
  const size_t colon = parts.front().find(':');
  const std::string_view sizes = parts.front().substr(0, colon);
  const std::string_view kind =
      colon == std::string_view::npos ? "h200" : parts.front().substr(colon + 1);
  Cluster cluster = cluster_of_kind(kind, origin);
  const size_t times = sizes.find('x');
  if (times != std::string_view::npos) {
    cluster.nodes = whole_number(sizes.substr(0, times), "nodes", origin);
  }
  const std::string_view gpus = times == std::string_view::npos ? sizes : sizes.substr(times + 1);
  cluster.gpus_per_node = whole_number(gpus, "gpus", origin);
  for (const std::string_view part : std::span(parts).subspan(1)) {
    const size_t equals = std::min(part.find('='), part.size());
    const std::string_view value = part.substr(std::min(equals + 1, part.size()));
    double number = kUnknown;
    const auto [end, problem] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (problem != std::errc() || end != value.data() + value.size()) number = kUnknown;
    set_rate(cluster, part.substr(0, equals), number, origin);
  }
  check(cluster, origin);
  return cluster;
}

std::string read_whole(const std::string& path) {
  std::error_code problem;
  const uint64_t bytes = std::filesystem::file_size(path, problem);
  if (problem) {
    throw Error(ErrorCode::kFileNotFound, {.what = "cannot read the description of the cluster",
                                           .file = path,
                                           .found = problem.message()});
  }
  if (bytes > kMostJsonBytes) {
    throw Error(ErrorCode::kJsonTooLarge, {.what = "the description of the cluster is too large",
                                           .file = path,
                                           .found = std::to_string(bytes),
                                           .limit = std::to_string(kMostJsonBytes) + " bytes"});
  }
  std::ifstream stream(path, std::ios::binary);
  std::string text(bytes, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(bytes));
  if (stream.gcount() == static_cast<std::streamsize>(bytes)) return text;
  throw Error(ErrorCode::kFileRead,
              {.what = "cannot read the description of the cluster", .file = path});
}

[[noreturn]] void wrong_type(const Origin& origin, const std::string& key, const char* expected) {
  throw Error(ErrorCode::kJsonType, {.what = "the description of the cluster has a wrong type",
                                     .file = origin.file,
                                     .tensor = key,
                                     .expected = expected});
}

int32_t integer_of(const nlohmann::json& value, const std::string& key, const Origin& origin) {
  if (!value.is_number_integer()) wrong_type(origin, key, "a whole number");
  const bool fits = value.is_number_unsigned()
                        ? value.get<uint64_t>() <= uint64_t{kMostGpus}
                        : value.get<int64_t>() >= 0 && value.get<int64_t>() <= kMostGpus;
  // A size beyond all limits is refused by them.
  return fits ? value.get<int32_t>() : std::numeric_limits<int32_t>::max();
}

Cluster parse_json(const std::string& path) {
  const Origin origin{path};
  const std::string text = read_whole(path);
  const nlohmann::json document = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (document.is_discarded()) {
    throw Error(ErrorCode::kJsonSyntax,
                {.what = "the description of the cluster is not JSON", .file = path});
  }
  if (!document.is_object()) wrong_type(origin, "", "an object");
  std::string kind = "custom";
  if (document.contains("gpu")) {
    if (!document["gpu"].is_string()) wrong_type(origin, "gpu", "a string");
    kind = document["gpu"].get<std::string>();
  }
  Cluster cluster = cluster_of_kind(kind, origin);
  for (const auto& [key, value] : document.items()) {
    if (key == "gpu") continue;
    if (key == "nodes") {
      cluster.nodes = integer_of(value, key, origin);
    } else if (key == "gpus") {
      cluster.gpus_per_node = integer_of(value, key, origin);
    } else {
      if (!value.is_number()) wrong_type(origin, key, "a number");
      set_rate(cluster, key, value.get<double>(), origin);
    }
  }
  check(cluster, origin);
  return cluster;
}

}  // namespace

Cluster parse_cluster(const std::string& text) {
  return text.ends_with(".json") ? parse_json(text) : parse_text(text);
}

std::string cluster_text(const Cluster& cluster) {
  if (cluster.nodes == 1) return fmt::format("{} {}", cluster.gpus_per_node, cluster.gpu);
  return fmt::format("{} nodes of {} {}", cluster.nodes, cluster.gpus_per_node, cluster.gpu);
}

nlohmann::ordered_json cluster_json(const Cluster& cluster) {
  nlohmann::ordered_json json = {
      {"gpu", cluster.gpu}, {"nodes", cluster.nodes}, {"gpus", cluster.gpus_per_node}};
  for (const Rate& rate : kRates) {
    const double value = cluster.*rate.member;
    if (std::isnan(value)) continue;
    json[std::string(rate.key)] = value;
  }
  return json;
}

}  // namespace conclave::tool
