#include "synth/coded.h"

#include "convert/conversion_options.h"
#include "output/durable_file.h"
#include "output/table.h"

#include "conclave/error.h"
#include "conclave/safetensors.h"
#include "conclave/synthetic.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

namespace conclave::tool {
namespace {

namespace fs = std::filesystem;

// Larger than any model: all tensors come into one shard.
constexpr uint64_t kOneShard = std::numeric_limits<uint64_t>::max();

std::vector<SynthTensor> tensors_of(const SynthModel& model) {
  return std::move(plan_shards(model, kOneShard).front().tensors);
}

// A model of values without the values, which takes no room on the disk, beside the destination
// while that is written.
class Outline {
 public:
  Outline(const SynthModel& model, const fs::path& destination) : path_(beside(destination)) {
    std::error_code problem;
    fs::remove_all(path_, problem);
    fs::create_directories(path_, problem);
    if (problem) {
      throw Error(ErrorCode::kFileWrite, {.what = "cannot make the directory",
                                          .file = path_.string(),
                                          .found = problem.message()});
    }
    write(model);
  }
  ~Outline() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Outline(const Outline&) = delete;
  Outline& operator=(const Outline&) = delete;

  const fs::path& path() const { return path_; }

 private:
  static fs::path beside(const fs::path& destination) {
    const fs::path path = fs::absolute(destination).lexically_normal();
    return (path.has_filename() ? path : path.parent_path()).string() + ".outline";
  }

  void write(const SynthModel& model) const {
    SafetensorsWriter writer(path_ / "model.safetensors", {{"format", "pt"}});
    for (const SynthTensor& tensor : tensors_of(model)) {
      writer.declare(tensor.name, tensor.dtype, tensor.shape);
    }
    writer.finish_with_zeros();
    write_durably(path_ / "config.json", json_text(make_config(model), 2) + "\n");
  }

  fs::path path_;
};

// The outline's tensors, with values that are drawn when they are asked for.
class RandomValues final : public ModelValues {
 public:
  RandomValues(const SynthModel& model, uint64_t seed) : spec_(model.spec), seed_(seed) {
    for (SynthTensor& tensor : tensors_of(model)) {
      std::string name = tensor.name;
      drawn_.emplace(std::move(name), std::move(tensor));
    }
  }

  std::unique_ptr<WeightSource> layer_source(int64_t layer) const override {
    return make_synthetic_source(spec_, seed_ + static_cast<uint64_t>(layer));
  }

  void read(std::string_view tensor, uint64_t offset,
            std::span<std::byte> destination) const override {
    const SynthTensor& drawn = drawn_.at(std::string(tensor));
    std::vector<std::byte> all(drawn.bytes);
    layer_source(drawn.layer)
        ->read(drawn.id, drawn.expert,
               {.row_begin = 0, .row_end = drawn.rows, .col_begin = 0, .col_end = drawn.cols}, all);
    std::ranges::copy(std::span(all).subspan(offset, destination.size()), destination.begin());
  }

 private:
  MoeSpec spec_;
  uint64_t seed_;
  std::unordered_map<std::string, SynthTensor> drawn_;
};

// The outline is gone when the user reads of it.
Error about(const fs::path& destination, const fs::path& outline, Error error) {
  ErrorDetail detail = error.detail();
  if (!detail.file.starts_with(outline.string())) return error;
  detail.file = destination.string();
  return {error.code(), std::move(detail)};
}

}  // namespace

WrittenModel write_coded_checkpoint(const Context& context, const CodedSynth& synth) {
  const Outline outline(synth.model, synth.destination);
  const RandomValues values(synth.model, synth.seed);
  const ConversionRequest request{.source = outline.path(),
                                  .destination = synth.destination,
                                  .format = synth.format,
                                  .container = synth.container,
                                  .shard_bytes = synth.shard_bytes,
                                  .existing = ExistingModel::kReplace,
                                  .unfinished = UnfinishedModel::kRemove,
                                  .tokens = 0,
                                  .values = &values,
                                  .writes_report = false};
  try {
    const ConversionReport report = convert_model(context, request);
    return {.path = report.model, .bytes = report.bytes_after, .shards = report.shards};
  } catch (const Error& error) {
    throw about(synth.destination, outline.path(), in_words_of_options(error, "--dtype"));
  }
}

}  // namespace conclave::tool
