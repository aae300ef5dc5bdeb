// Whether the result of a conversion could be read, asked of the reader itself: a checkpoint is
// opened by its headers, and a file may have the size of its data without the data.
#include "convert/plan.h"

#include "conclave/checkpoint.h"
#include "conclave/error.h"

#include <fmt/format.h>

#include <array>
#include <fstream>
#include <system_error>

namespace conclave::tool {
namespace {

// A directory that goes when the question is answered.
class Scratch {
 public:
  explicit Scratch(std::filesystem::path path) : path_(std::move(path)) {
    std::error_code problem;
    std::filesystem::remove_all(path_, problem);
    std::filesystem::create_directory(path_, problem);
    if (problem) fail(path_, problem.message());
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  const std::filesystem::path& path() const { return path_; }

  [[noreturn]] static void fail(const std::filesystem::path& path, std::string found) {
    throw Error(
        ErrorCode::kFileWrite,
        {.what = "cannot write the file", .file = path.string(), .found = std::move(found)});
  }

 private:
  std::filesystem::path path_;
};

std::string header_of(const ConversionPlan& plan) {
  std::string header = "{";
  uint64_t begin = 0;
  for (const PlannedShard& shard : plan.shards) {
    for (const PlannedTensor& tensor : shard.tensors) {
      const nlohmann::json name = tensor.name;
      header += fmt::format(R"({}{}:{{"dtype":"{}","shape":{},"data_offsets":[{},{}]}})",
                            header.size() > 1 ? "," : "", name.dump(), to_string(tensor.dtype),
                            nlohmann::json(tensor.shape).dump(), begin, begin + tensor.bytes);
      begin += tensor.bytes;
    }
  }
  header += "}";
  header.append((8 - header.size() % 8) % 8, ' ');
  return header;
}

void write_outline(const ConversionPlan& plan, const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / "model.safetensors";
  const std::string header = header_of(plan);
  std::array<char, 8> length{};
  for (size_t i = 0; i < length.size(); ++i) {
    length[i] = static_cast<char>((header.size() >> (8 * i)) & 0xFF);
  }
  std::ofstream file(path, std::ios::binary);
  file.write(length.data(), length.size());
  file << header;
  file.close();
  std::ofstream config(directory / "config.json", std::ios::binary);
  config << plan.config;
  config.close();
  if (!file || !config) Scratch::fail(path, "a failed write");
  std::error_code problem;
  std::filesystem::resize_file(path, length.size() + header.size() + plan.bytes, problem);
  if (problem) Scratch::fail(path, problem.message());
}

[[noreturn]] void refuse(const ConvertRequest& request, std::string tensor, std::string reason) {
  throw Error(ErrorCode::kUnsupported,
              {.what = fmt::format("no reader takes this model's experts as {}", request.form.name),
               .file = request.source.string(),
               .tensor = std::move(tensor),
               .found = std::move(reason)});
}

void check_layers(const Checkpoint& result, const ConvertRequest& request) {
  for (const int64_t index : request.layers) {
    const CheckpointLayer& layer = result.layer(index);
    if (!layer.support) refuse(request, layer.prefix, layer.support.reason());
  }
}

}  // namespace

void require_readable(const ConversionPlan& plan, const ConvertRequest& request,
                      const std::filesystem::path& scratch) {
  const Scratch directory(scratch);
  write_outline(plan, directory.path());
  try {
    check_layers(Checkpoint::open(directory.path()), request);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kUnsupported || error.code() == ErrorCode::kFileWrite) throw;
    const ErrorDetail& detail = error.detail();
    refuse(request, detail.tensor,
           fmt::format("{}{}{}", detail.what, detail.found.empty() ? "" : ": ", detail.found));
  }
}

}  // namespace conclave::tool
