#include "convert/conversion.h"

#include "convert/forms/target_form.h"
#include "convert/journal.h"
#include "convert/module_codes.h"
#include "convert/report.h"
#include "convert/result_directory.h"
#include "convert/result_files.h"
#include "convert/source_model.h"
#include "convert/write_shard.h"
#include "input/batch.h"

#include "conclave/error.h"
#include "conclave/version.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>

namespace conclave::tool {
namespace {

constexpr uint64_t kMeasureBytes = uint64_t{512} << 20;

std::string rule_name(ScaleRule rule) { return rule == ScaleRule::kAmax ? "amax" : "search"; }

uint64_t part_of(uint64_t bytes, double share) {
  return static_cast<uint64_t>(std::llround(static_cast<double>(bytes) * share));
}

// Two runs with one key write the same bytes.
nlohmann::ordered_json key_of(const SourceModel& source, const ConvertRequest& request) {
  nlohmann::ordered_json keep = nlohmann::ordered_json::array();
  for (const KeepRule& rule : request.keep) {
    keep.push_back({rule.pattern, rule.form ? rule.form->name() : "source"});
  }
  return {{"conclave", build_info().version},
          {"source", std::filesystem::canonical(source.path()).string()},
          {"files", source.identity()},
          {"form", request.form->name()},
          {"container", request.container == Container::kGguf ? "gguf" : "safetensors"},
          {"layers", request.layers},
          {"keep", keep},
          {"scales", rule_name(request.rule)},
          {"shard_bytes", request.shard_bytes}};
}

BatchSource rows_of(const ErrorMeasurement& measurement) {
  return BatchSource({.input = measurement.input,
                      .record = measurement.record,
                      .random_tokens = measurement.tokens,
                      .seed = measurement.seed});
}

class Conversion {
 public:
  Conversion(const Context& context, const ConvertRequest& request)
      : context_(context),
        request_(request),
        source_(SourceModel::open(request.source)),
        plan_(plan_conversion(*source_, request)),
        files_(source_->result_files(plan_, request)),
        directory_(request.destination, request.source,
                   request.replace ? Existing::kReplace : Existing::kRefuse) {}

  ConversionReport run(const ErrorMeasurement& measurement) {
    Journal journal(directory_.unfinished(), key_of(*source_, request_));
    const std::vector<const ShardRecord*> intact = find_intact(journal);
    clean_up(intact);
    check_possible(intact, measurement);
    for (const ShardRecord* record : intact) keep(*record);
    write_missing(journal);
    left_out_ = files_->finish(directory_);
    ConversionReport report = describe();
    report.shards_kept = intact.size();
    measure(measurement, report);
    source_->check_unchanged();
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
      if (is_intact(*files_, shard, record->second, directory_.unfinished())) {
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
  void check_possible(const std::vector<const ShardRecord*>& intact,
                      const ErrorMeasurement& measurement) const {
    try {
      check_rows(measurement);
      require_readable(source_->checkpoint(), *files_, request_,
                       directory_.unfinished() / "outline");
      directory_.require_room(plan_.bytes - bytes_of(intact));
    } catch (const Error&) {
      if (intact.empty()) directory_.discard();
      throw;
    }
  }

  // Recorded rows must be there for every layer.
  void check_rows(const ErrorMeasurement& measurement) const {
    if (measurement.tokens == 0 || measurement.input.empty()) return;
    const BatchSource batches = rows_of(measurement);
    for (const int64_t layer : request_.layers) {
      static_cast<void>(batches.check(layer, source_->checkpoint().layer(layer).spec));
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
    ModuleCodes codes(context_, *source_, plan_);
    uint64_t done = 0;
    const std::function<void(uint64_t)> written = [&](uint64_t bytes) {
      done += bytes;
      context_.progress("converting", static_cast<int64_t>(done),
                        static_cast<int64_t>(plan_.bytes));
    };
    const ShardJob job{.context = context_,
                       .plan = plan_,
                       .source = *source_,
                       .files = *files_,
                       .codes = codes,
                       .directory = directory_.unfinished(),
                       .written = written};
    for (const PlannedShard& shard : plan_.shards) {
      if (records_.contains(shard.file_name)) {
        written(shard.bytes);
        continue;
      }
      ShardRecord record = write_shard(job, shard);
      journal.add(record);
      keep(record);
    }
  }

  ConversionReport describe() const {
    ConversionReport report{.source = request_.source.string(),
                            .destination = directory_.final_path().string(),
                            .model_type = source_->checkpoint().model_type(),
                            .form = request_.form->name(),
                            .scales = rule_name(request_.rule),
                            .bytes_before = bytes_of_source(),
                            .bytes_after = plan_.bytes,
                            .shards = plan_.shards.size(),
                            .left_out = left_out_,
                            .incomplete = plan_.incomplete,
                            .no_tokenizer = plan_.no_tokenizer,
                            .tensors_left_out = plan_.left_out,
                            .keeps_others = keeps_others()};
    const std::vector<uint64_t> bytes_after = bytes_of_modules();
    for (const PlannedMatrix& matrix : plan_.matrices) {
      const auto index = static_cast<size_t>(matrix.module);
      const ConvertedModule& module = plan_.modules[index];
      const double share = static_cast<double>(matrix.rows) / static_cast<double>(module.rows);
      report.modules.push_back({.name = matrix.name,
                                .layer = module.layer,
                                .kind = matrix.kind,
                                .rows = matrix.rows,
                                .cols = module.cols,
                                .form = module.form->name(),
                                .bytes_before = part_of(module.source_bytes, share),
                                .bytes_after = part_of(bytes_after[index], share)});
    }
    for (const PlannedShard& shard : plan_.shards) {
      for (const auto& [matrix, error] : records_.at(shard.file_name).errors) {
        report.modules[static_cast<size_t>(matrix)].error = error;
      }
    }
    return report;
  }

  // A GGUF file of a directory's layers has no names for what else the model has.
  bool keeps_others() const {
    return plan_.incomplete.empty() || request_.container == source_->container() ||
           request_.container == Container::kSafetensors;
  }

  // The part of the source that the result stands for.
  uint64_t bytes_of_source() const {
    const Checkpoint& model = source_->checkpoint();
    if (keeps_others()) return model.total_bytes();
    uint64_t bytes = 0;
    for (const int64_t layer : request_.layers) bytes += model.layer(layer).bytes;
    return bytes;
  }

  std::vector<uint64_t> bytes_of_modules() const {
    std::vector<uint64_t> bytes(plan_.modules.size());
    for (const PlannedShard& shard : plan_.shards) {
      for (const PlannedTensor& tensor : shard.tensors) {
        if (tensor.module >= 0) bytes[static_cast<size_t>(tensor.module)] += tensor.bytes;
      }
    }
    return bytes;
  }

  void measure(const ErrorMeasurement& measurement, ConversionReport& report) const {
    report.tokens = measurement.tokens;
    report.seed = measurement.seed;
    if (measurement.tokens == 0) return;
    report.input = measurement.input;
    const BatchSource batches = rows_of(measurement);
    const Checkpoint result = Checkpoint::open(files_->model_in(directory_.unfinished()));
    const Context context = measuring_context();
    const auto bytes_of_layer = [&](int64_t layer) {
      return static_cast<int64_t>(source_->checkpoint().layer(layer).bytes);
    };
    int64_t total = 0;
    for (const int64_t layer : request_.layers) total += bytes_of_layer(layer);
    int64_t done = 0;
    for (const int64_t layer : request_.layers) {
      report.layers.push_back(layer_error(context, source_->checkpoint(), result, layer, batches));
      const auto rows = static_cast<int64_t>(report.layers.back().tokens.size());
      report.tokens = report.layers.size() == 1 ? rows : std::max(report.tokens, rows);
      context_.progress("measuring", done += bytes_of_layer(layer), total);
    }
  }

  // As many threads as experts in float64 fit kMeasureBytes, but one.
  Context measuring_context() const {
    double largest = 1;
    for (const int64_t layer : request_.layers) {
      const MoeSpec& spec = source_->checkpoint().layer(layer).spec;
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
  std::unique_ptr<const SourceModel> source_;
  ConversionPlan plan_;
  std::unique_ptr<const ResultFiles> files_;
  ResultDirectory directory_;
  std::map<std::string, ShardRecord> records_;
  std::vector<std::string> left_out_;
};

}  // namespace

ConversionReport convert_model(const Context& context, const ConvertRequest& request,
                               const ErrorMeasurement& measurement) {
  return Conversion(context, request).run(measurement);
}

}  // namespace conclave::tool
