#include "synth/coded.h"

#include "convert/module_codes.h"
#include "convert/plan.h"
#include "convert/result_directory.h"
#include "convert/result_files.h"
#include "convert/safetensors_model.h"
#include "convert/write_shard.h"
#include "output/table.h"

#include "conclave/error.h"
#include "conclave/safetensors.h"
#include "conclave/synthetic.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

namespace conclave::tool {
namespace {

// Larger than any model: all tensors come into one shard.
constexpr uint64_t kOneShard = std::numeric_limits<uint64_t>::max();

std::vector<SynthTensor> tensors_of(const SynthModel& model) {
  return std::move(plan_shards(model, kOneShard).front().tensors);
}

// Writes a model of values without the values, which take no room on the disk.
void write_outline(const SynthModel& model, const std::filesystem::path& directory) {
  std::filesystem::create_directory(directory);
  SafetensorsWriter writer(directory / safetensors_shard_name(0, 1), {{"format", "pt"}});
  for (const SynthTensor& tensor : tensors_of(model)) {
    writer.declare(tensor.name, tensor.dtype, tensor.shape);
  }
  writer.finish_with_zeros();
  write_durably(directory / "config.json", json_text(make_config(model), 2) + "\n");
}

// The outline's tensors, with values that are drawn when they are asked for.
class RandomModel final : public SafetensorsModel {
 public:
  RandomModel(const SynthModel& model, uint64_t seed, const std::filesystem::path& outline)
      : SafetensorsModel(outline), spec_(model.spec), seed_(seed) {
    for (SynthTensor& tensor : tensors_of(model)) {
      std::string name = tensor.name;
      drawn_.emplace(std::move(name), std::move(tensor));
    }
  }

  std::unique_ptr<WeightSource> layer_source(int64_t layer) const override {
    return make_synthetic_source(spec_, seed_ + static_cast<uint64_t>(layer));
  }

  void read(const SourceTensor& tensor, uint64_t offset,
            std::span<std::byte> destination) const override {
    const SynthTensor& drawn = drawn_.at(tensor.name);
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

void write_shards(const Context& context, const SourceModel& source, const ConversionPlan& plan,
                  const ResultFiles& files, const std::filesystem::path& directory,
                  Console& console) {
  ModuleCodes codes(context, source, plan);
  uint64_t done = 0;
  const std::function<void(uint64_t)> written = [&](uint64_t bytes) {
    done += bytes;
    console.progress("writing", static_cast<int64_t>(done), static_cast<int64_t>(plan.bytes));
  };
  const ShardJob job{.context = context,
                     .plan = plan,
                     .source = source,
                     .files = files,
                     .codes = codes,
                     .directory = directory,
                     .written = written};
  for (const PlannedShard& shard : plan.shards) write_shard(job, shard);
}

WrittenModel write_into(const ResultDirectory& directory, const Context& context,
                        const CodedSynth& synth, Console& console) {
  const std::filesystem::path outline = directory.unfinished() / "outline";
  write_outline(synth.model, outline);
  const RandomModel source(synth.model, synth.seed, outline);
  ConvertRequest request;
  request.source = synth.destination;  // for messages
  request.destination = synth.destination;
  request.form = synth.form;
  request.container = synth.container;
  request.shard_bytes = synth.shard_bytes;
  for (int64_t layer = 0; layer < synth.model.num_layers; ++layer) request.layers.push_back(layer);
  const ConversionPlan plan = plan_conversion(source, request);
  const std::unique_ptr<ResultFiles> files = source.result_files(plan, request);
  require_readable(source.checkpoint(), *files, request, directory.unfinished() / "readable");
  directory.require_room(plan.bytes);
  write_shards(context, source, plan, *files, directory.unfinished(), console);
  files->finish(directory);
  std::filesystem::remove_all(outline);
  return {.path = files->model_in(directory.final_path()),
          .bytes = plan.bytes,
          .shards = plan.shards.size()};
}

}  // namespace

WrittenModel write_coded_checkpoint(const Context& context, const CodedSynth& synth,
                                    Console& console) {
  const ResultDirectory directory(synth.destination, {}, Existing::kReplace);
  try {
    const WrittenModel written = write_into(directory, context, synth, console);
    directory.publish();
    return written;
  } catch (const Error&) {
    directory.discard();
    throw;
  }
}

}  // namespace conclave::tool
