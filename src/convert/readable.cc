// Whether the result of a conversion could be read, asked of the reader itself: a checkpoint is
// opened by its headers, and a file may have the size of its data without the data.
#include "convert/forms/target_form.h"
#include "convert/result_files.h"

#include "conclave/checkpoint.h"
#include "conclave/error.h"
#include "conclave/gguf_layers.h"

#include <fmt/format.h>

#include <system_error>

namespace conclave::inline v0::conversion {
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

[[noreturn]] void refuse(const ResolvedRequest& request, std::string tensor, std::string reason) {
  throw Error(
      ErrorCode::kUnsupported,
      {.what = fmt::format("no reader takes this model's experts as {}", request.form->name()),
       .file = request.source.string(),
       .tensor = std::move(tensor),
       .found = std::move(reason)});
}

void check_layers(const Checkpoint& source, const Checkpoint& result,
                  const ResolvedRequest& request) {
  for (const int64_t index : request.layers) {
    const CheckpointLayer& layer = result.layer(index);
    if (!layer.support) refuse(request, layer.prefix, layer.support.reason());
    if (container_of(request.source) == request.container) continue;
    const Support same = means_the_same(source.layer(index).spec, layer.spec);
    if (!same) refuse(request, layer.prefix, same.reason());
  }
}

}  // namespace

void require_readable(const Checkpoint& source, const ResultFiles& files,
                      const ResolvedRequest& request, const std::filesystem::path& scratch) {
  const Scratch directory(scratch);
  const std::filesystem::path model = files.write_outline(directory.path());
  try {
    check_layers(source, Checkpoint::open(model), request);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kUnsupported || error.code() == ErrorCode::kFileWrite) throw;
    const ErrorDetail& detail = error.detail();
    refuse(request, detail.tensor,
           fmt::format("{}{}{}", detail.what, detail.found.empty() ? "" : ": ", detail.found));
  }
}

}  // namespace conclave::inline v0::conversion
