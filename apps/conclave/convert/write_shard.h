// Streams one shard of a conversion to disk.
#pragma once

#include "convert/module_codes.h"
#include "convert/plan.h"

#include "conclave/context.h"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>

namespace conclave::tool {

struct ShardRecord {
  std::string file_name;
  uint64_t checksum = 0;                    // over the tensors' data
  std::map<int32_t, QuantiseError> errors;  // by module
};

// Pieces are computed in parallel and written in order; memory stays at a few per thread. `written`
// is told how many bytes each write adds. Throws Error(kFileWrite, kFileRead, kTensorValue).
ShardRecord write_shard(const Context& context, const PlannedShard& shard, ModuleCodes& codes,
                        const std::filesystem::path& directory,
                        const std::function<void(uint64_t)>& written);

// Whether the file holds the shard with this checksum; false if it is missing or damaged.
bool is_intact(const PlannedShard& shard, const ShardRecord& record,
               const std::filesystem::path& directory);

}  // namespace conclave::tool
