#include "convert/compare_layers.h"
#include "convert/forms/target_form.h"
#include "convert/journal.h"
#include "convert/module_codes.h"
#include "convert/request.h"
#include "convert/result_directory.h"
#include "convert/result_files.h"
#include "convert/source_model.h"
#include "convert/write_shard.h"

#include "conclave/checkpoint.h"
#include "conclave/context.h"
#include "conclave/convert.h"
#include "conclave/error.h"
#include "conclave/version.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::conversion {
namespace {

constexpr uint64_t kCompareBytes = uint64_t{512} << 20;

std::string rule_name(ScaleRule rule) { return rule == ScaleRule::kAmax ? "amax" : "search"; }

uint64_t part_of(uint64_t bytes, double share) {
  return static_cast<uint64_t>(std::llround(static_cast<double>(bytes) * share));
}

// Two runs with one key write the same bytes.
nlohmann::ordered_json key_of(const SourceModel& source, const ResolvedRequest& request) {
  nlohmann::ordered_json keep = nlohmann::ordered_json::array();
  for (const KeptForm& rule : request.keep) {
    keep.push_back({rule.pattern, rule.form ? rule.form->name() : "source"});
  }
  return {{"conclave", build_info().version},
          {"source", std::filesystem::canonical(source.path()).string()},
          {"files", source.identity()},
          {"form", request.form->name()},
          {"container", request.container == ModelContainer::kGguf ? "gguf" : "safetensors"},
          {"layers", request.layers},
          {"keep", keep},
          {"scales", rule_name(request.rule)},
          {"shard_bytes", request.shard_bytes}};
}

// Tells the caller and the context's log. What the caller throws goes through.
class Progress {
 public:
  Progress(const Context& context, const ConversionRequest& request)
      : context_(context), request_(request) {}

  void tell(std::string_view phase, uint64_t done, uint64_t total) const {
    const auto of_total = static_cast<int64_t>(total);
    context_.progress(phase, static_cast<int64_t>(done), of_total);
    if (request_.progress) request_.progress(phase, static_cast<int64_t>(done), of_total);
  }

 private:
  const Context& context_;
  const ConversionRequest& request_;
};

class Conversion {
 public:
  Conversion(const Context& context, const ConversionRequest& asked)
      : context_(context),
        asked_(asked),
        progress_(context, asked),
        source_(SourceModel::open(asked.source, asked.values)),
        request_(resolve(asked, source_->checkpoint())),
        plan_(plan_conversion(*source_, request_)),
        files_(source_->result_files(plan_, request_)),
        directory_(asked.destination, asked.source, asked.existing) {}

  ConversionReport run() {
    const bool removes = asked_.unfinished == UnfinishedModel::kRemove;
    try {
      return write();
    } catch (...) {
      // The next conversion has no use for a directory without a finished shard.
      if (directory_.is_new() && (removes || records_.empty())) directory_.discard();
      throw;
    }
  }

 private:
  ConversionReport write() {
    Journal journal(directory_.unfinished(), key_of(*source_, request_));
    const std::vector<const ShardRecord*> intact = find_intact(journal);
    clean_up(intact);
    check_possible(intact);
    for (const ShardRecord* record : intact) keep(*record);
    write_missing(journal);
    left_out_ = files_->finish(directory_);
    ConversionReport report = describe();
    report.shards_kept = intact.size();
    compare_layers(report);
    source_->check_unchanged();
    if (asked_.writes_report) {
      write_durably(directory_.unfinished() / kReportFile, to_json(report));
    }
    if (asked_.complete) asked_.complete(report, directory_.unfinished());
    std::filesystem::remove(directory_.unfinished() / kJournalFile);
    directory_.publish();
    return report;
  }

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
  void check_possible(const std::vector<const ShardRecord*>& intact) const {
    try {
      check_rows();
      require_readable(source_->checkpoint(), *files_, request_,
                       directory_.unfinished() / "outline");
      directory_.require_room(plan_.bytes - bytes_of(intact));
    } catch (const Error&) {
      if (intact.empty()) directory_.discard();
      throw;
    }
  }

  // An application's rows must be there for every layer.
  void check_rows() const {
    if (asked_.tokens == 0 || asked_.rows == nullptr) return;
    for (const int64_t layer : request_.layers) {
      asked_.rows->check(layer, source_->checkpoint().layer(layer).spec);
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
      progress_.tell("converting", done, plan_.bytes);
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
                            .model = files_->model_in(directory_.final_path()),
                            .model_type = source_->checkpoint().model_type(),
                            .format = request_.form->name(),
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
      report.matrices.push_back({.name = matrix.name,
                                 .layer = module.layer,
                                 .kind = matrix.kind,
                                 .rows = matrix.rows,
                                 .cols = module.cols,
                                 .format = module.form->name(),
                                 .bytes_before = part_of(module.source_bytes, share),
                                 .bytes_after = part_of(bytes_after[index], share)});
    }
    for (const PlannedShard& shard : plan_.shards) {
      for (const auto& [matrix, error] : records_.at(shard.file_name).errors) {
        report.matrices[static_cast<size_t>(matrix)].error = error;
      }
    }
    return report;
  }

  // A GGUF file of a directory's layers has no names for what else the model has.
  bool keeps_others() const {
    return plan_.incomplete.empty() || request_.container == source_->container() ||
           request_.container == ModelContainer::kSafetensors;
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

  ComparedRows rows_of(int64_t layer) const {
    const MoeSpec& spec = source_->checkpoint().layer(layer).spec;
    if (asked_.rows != nullptr) return asked_.rows->load(layer, spec);
    return random_rows(spec, asked_.tokens, asked_.seed + static_cast<uint64_t>(layer));
  }

  void compare_layers(ConversionReport& report) const {
    report.tokens = asked_.tokens;
    report.seed = asked_.seed;
    if (asked_.tokens == 0) return;
    if (asked_.rows != nullptr) report.input = asked_.rows->name();
    const Checkpoint result = Checkpoint::open(files_->model_in(directory_.unfinished()));
    const Context context = comparing_context();
    const auto bytes_of_layer = [&](int64_t layer) {
      return source_->checkpoint().layer(layer).bytes;
    };
    uint64_t total = 0;
    for (const int64_t layer : request_.layers) total += bytes_of_layer(layer);
    uint64_t done = 0;
    for (const int64_t layer : request_.layers) {
      report.layers.push_back(compare_layer(context, *source_, result, layer, rows_of(layer)));
      const auto rows = static_cast<int64_t>(report.layers.back().tokens.size());
      report.tokens = report.layers.size() == 1 ? rows : std::max(report.tokens, rows);
      progress_.tell("measuring", done += bytes_of_layer(layer), total);
    }
  }

  // It has a thread for each float64 expert in kCompareBytes, but one.
  Context comparing_context() const {
    double largest = 1;
    for (const int64_t layer : request_.layers) {
      const MoeSpec& spec = source_->checkpoint().layer(layer).spec;
      const int64_t width = std::max(spec.intermediate_size, spec.shared.intermediate_size);
      largest = std::max(largest,
                         24.0 * static_cast<double>(spec.hidden_size) * static_cast<double>(width));
    }
    const auto fitting =
        static_cast<int32_t>(std::clamp(static_cast<double>(kCompareBytes) / largest, 1.0, 1024.0));
    return Context(
        {.device = "cpu", .num_threads = std::min(fitting, context_.executor().concurrency())});
  }

  const Context& context_;
  const ConversionRequest& asked_;
  Progress progress_;
  std::unique_ptr<const SourceModel> source_;
  ResolvedRequest request_;
  ConversionPlan plan_;
  std::unique_ptr<const ResultFiles> files_;
  ResultDirectory directory_;
  std::map<std::string, ShardRecord> records_;
  std::vector<std::string> left_out_;
};

}  // namespace
}  // namespace conclave::inline v0::conversion

namespace conclave::inline v0 {

ConversionReport convert_model(const Context& context, const ConversionRequest& request) {
  return conversion::Conversion(context, request).run();
}

}  // namespace conclave::inline v0
