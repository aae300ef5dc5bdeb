// Streams one shard of a conversion to disk.
#pragma once

#include "convert/module_codes.h"
#include "convert/plan.h"
#include "convert/result_files.h"

#include "conclave/context.h"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>

namespace conclave::inline v0::conversion {

struct ShardRecord {
  std::string file_name;
  uint64_t checksum = 0;                    // over the tensors' data
  std::map<int32_t, QuantiseError> errors;  // by matrix of the plan
};

// Writing a shard needs this of the conversion.
struct ShardJob {
  const Context& context;
  const ConversionPlan& plan;
  const SourceModel& source;
  const ResultFiles& files;
  ModuleCodes& codes;
  const std::filesystem::path& directory;
  // Told how many bytes each write adds.
  const std::function<void(uint64_t)>& written;
};

// Pieces are computed in parallel and written in order; memory stays at a few per thread, and what
// a module leaves for tensors that are not streamed. Throws Error(kFileWrite, kFileRead,
// kTensorValue).
ShardRecord write_shard(const ShardJob& job, const PlannedShard& shard);

// Whether the file holds the shard with this checksum; false if it is missing or damaged.
bool is_intact(const ResultFiles& files, const PlannedShard& shard, const ShardRecord& record,
               const std::filesystem::path& directory);

}  // namespace conclave::inline v0::conversion
