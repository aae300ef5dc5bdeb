// The journal lists finished shards, line by line in the unfinished directory, so that a conversion
// that was ended goes on where it was.
#pragma once

#include "convert/write_shard.h"

#include <nlohmann/json.hpp>

#include <filesystem>
#include <map>
#include <string>

namespace conclave::inline v0::conversion {

inline constexpr const char* kJournalFile = "conversion.journal";

class Journal {
 public:
  // Opens or begins the journal of the directory for a conversion that `key` describes. Throws
  // Error(kFileWrite) if it is another's, if another process is at work, or if it cannot be
  // written.
  Journal(const std::filesystem::path& directory, const nlohmann::ordered_json& key);
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  // Shards finished before, by file name.
  const std::map<std::string, ShardRecord>& finished() const { return finished_; }
  // The line is on the disk when it returns.
  void add(const ShardRecord& record);

 private:
  void lock() const;
  // Returns whether there was one.
  bool read(const nlohmann::ordered_json& key);
  std::string whole_lines();
  void append(const nlohmann::ordered_json& line);

  std::filesystem::path path_;
  int descriptor_ = -1;
  std::map<std::string, ShardRecord> finished_;
};

}  // namespace conclave::inline v0::conversion
