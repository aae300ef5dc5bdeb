#include "convert/conversion.h"

#include "convert/journal.h"
#include "convert/module_codes.h"
#include "convert/report.h"
#include "convert/result_directory.h"
#include "convert/source_model.h"
#include "convert/write_shard.h"
#include "output/table.h"

#include "conclave/error.h"
#include "conclave/version.h"

#include <algorithm>
#include <map>

namespace conclave::tool {
namespace {

constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr uint64_t kMeasureBytes = uint64_t{512} << 20;

std::string rule_name(ScaleRule rule) { return rule == ScaleRule::kAmax ? "amax" : "search"; }

std::string kind_of(const ConvertedModule& module) {
  std::string kind = to_string(module.parts.front().id);
  if (module.parts.size() > 1) kind += "_up";
  return kind;
}

// Two runs with one key write the same bytes.
nlohmann::ordered_json key_of(const SourceModel& source, const ConvertRequest& request) {
  nlohmann::ordered_json keep = nlohmann::ordered_json::array();
  for (const KeepRule& rule : request.keep) {
    keep.push_back({rule.pattern, rule.form ? std::string(rule.form->name) : "source"});
  }
  return {{"conclave", build_info().version},
          {"source", std::filesystem::canonical(source.directory()).string()},
          {"files", source.identity()},
          {"form", std::string(request.form.name)},
          {"layers", request.layers},
          {"keep", keep},
          {"scales", rule_name(request.rule)},
          {"shard_bytes", request.shard_bytes}};
}

class Conversion {
 public:
  Conversion(const Context& context, const ConvertRequest& request)
      : context_(context),
        request_(request),
        source_(request.source),
        plan_(plan_conversion(source_, request)),
        directory_(request.destination, request.source,
                   request.replace ? Existing::kReplace : Existing::kRefuse) {}

  ConversionReport run(const Measurement& measurement) {
    Journal journal(directory_.unfinished(), key_of(source_, request_));
    const std::vector<const ShardRecord*> intact = find_intact(journal);
    clean_up(intact);
    check_possible(intact);
    for (const ShardRecord* record : intact) keep(*record);
    write_missing(journal);
    finish_files();
    ConversionReport report = describe();
    report.shards_kept = intact.size();
    measure(measurement, report);
    source_.check_unchanged();
    write_report(report, directory_.unfinished());
    std::filesystem::remove(directory_.unfinished() / kJournalFile);
    directory_.publish();
    return report;
  }

 private:
  std::vector<const ShardRecord*> find_intact(const Journal& journal) const {
    std::vector<const ShardRecord*> intact;
    for (const PlannedShard& shard : plan_.shards) {
      const auto record = journal.finished().find(shard.file_name);
      if (record == journal.finished().end()) continue;
      if (is_intact(shard, record->second, directory_.unfinished())) {
        intact.push_back(&record->second);
      }
    }
    return intact;
  }

  void clean_up(const std::vector<const ShardRecord*>& intact) const {
    std::vector<std::string> names = {kJournalFile};
    for (const ShardRecord* record : intact) names.push_back(record->file_name);
    directory_.remove_all_but(names);
  }

  // A conversion that cannot be leaves nothing behind.
  void check_possible(const std::vector<const ShardRecord*>& intact) const {
    try {
      require_readable(plan_, request_, directory_.unfinished() / "outline");
      directory_.require_room(plan_.bytes - bytes_of(intact));
    } catch (const Error&) {
      if (intact.empty()) directory_.discard();
      throw;
    }
  }

  uint64_t bytes_of(const std::vector<const ShardRecord*>& records) const {
    uint64_t bytes = 0;
    for (const PlannedShard& shard : plan_.shards) {
      const bool there =
          std::ranges::find(records, shard.file_name, &ShardRecord::file_name) != records.end();
      if (there) bytes += shard.bytes;
    }
    return bytes;
  }

  void keep(const ShardRecord& record) { records_[record.file_name] = record; }

  void write_missing(Journal& journal) {
    ModuleCodes codes(context_, source_, plan_, request_.rule);
    uint64_t done = 0;
    const auto written = [&](uint64_t bytes) {
      done += bytes;
      context_.progress("converting", static_cast<int64_t>(done),
                        static_cast<int64_t>(plan_.bytes));
    };
    for (const PlannedShard& shard : plan_.shards) {
      if (records_.contains(shard.file_name)) {
        written(shard.bytes);
        continue;
      }
      ShardRecord record = write_shard(context_, shard, codes, directory_.unfinished(), written);
      journal.add(record);
      keep(record);
    }
  }

  void finish_files() {
    const std::filesystem::path& path = directory_.unfinished();
    if (plan_.shards.size() > 1)
      write_durably(path / kIndexFile, json_text(plan_.index(), 2) + "\n");
    left_out_ = directory_.copy_other_files(source_);
    write_durably(path / "config.json", plan_.config);
  }

  ConversionReport describe() const {
    ConversionReport report{.source = request_.source.string(),
                            .destination = directory_.final_path().string(),
                            .model_type = source_.checkpoint().model_type(),
                            .form = std::string(request_.form.name),
                            .scales = rule_name(request_.rule),
                            .bytes_before = source_.checkpoint().total_bytes(),
                            .bytes_after = plan_.bytes,
                            .shards = plan_.shards.size(),
                            .left_out = left_out_};
    for (const ConvertedModule& module : plan_.modules) {
      report.modules.push_back({.name = module.name,
                                .layer = module.layer,
                                .kind = kind_of(module),
                                .rows = module.rows,
                                .cols = module.cols,
                                .form = std::string(module.form.name),
                                .bytes_before = module.source_bytes});
    }
    for (const PlannedShard& shard : plan_.shards) {
      for (const PlannedTensor& tensor : shard.tensors) {
        if (tensor.module < 0) continue;
        report.modules[static_cast<size_t>(tensor.module)].bytes_after += tensor.bytes;
      }
      for (const auto& [module, error] : records_.at(shard.file_name).errors) {
        report.modules[static_cast<size_t>(module)].error = error;
      }
    }
    return report;
  }

  void measure(const Measurement& measurement, ConversionReport& report) const {
    report.tokens = measurement.tokens;
    report.seed = measurement.seed;
    if (measurement.tokens == 0) return;
    const Checkpoint result = Checkpoint::open(directory_.unfinished());
    const Context context = measuring_context();
    const auto bytes_of_layer = [&](int64_t layer) {
      return static_cast<int64_t>(source_.checkpoint().layer(layer).bytes);
    };
    int64_t total = 0;
    for (const int64_t layer : request_.layers) total += bytes_of_layer(layer);
    int64_t done = 0;
    for (const int64_t layer : request_.layers) {
      report.layers.push_back(layer_error(context, source_.checkpoint(), result, layer,
                                          measurement.tokens, measurement.seed));
      context_.progress("measuring", done += bytes_of_layer(layer), total);
    }
  }

  // As many threads as experts in float64 fit kMeasureBytes, but one.
  Context measuring_context() const {
    double largest = 1;
    for (const int64_t layer : request_.layers) {
      const MoeSpec& spec = source_.checkpoint().layer(layer).spec;
      const int64_t width = std::max(spec.intermediate_size, spec.shared.intermediate_size);
      largest = std::max(largest,
                         24.0 * static_cast<double>(spec.hidden_size) * static_cast<double>(width));
    }
    const auto fitting =
        static_cast<int32_t>(std::clamp(static_cast<double>(kMeasureBytes) / largest, 1.0, 1024.0));
    return Context(
        {.device = "cpu", .num_threads = std::min(fitting, context_.executor().concurrency())});
  }

  const Context& context_;
  const ConvertRequest& request_;
  SourceModel source_;
  ConversionPlan plan_;
  ResultDirectory directory_;
  std::map<std::string, ShardRecord> records_;
  std::vector<std::string> left_out_;
};

}  // namespace

ConversionReport convert_model(const Context& context, const ConvertRequest& request,
                               const Measurement& measurement) {
  return Conversion(context, request).run(measurement);
}

}  // namespace conclave::tool
