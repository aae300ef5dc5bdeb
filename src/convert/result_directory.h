// The directory of a conversion: under another name until it is complete.
#pragma once

#include "conclave/convert.h"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::conversion {

// Results of any container have it, if they have a report.
inline constexpr const char* kReportFile = "conversion.json";

class ResultDirectory {
 public:
  // Throws Error(kFileWrite) for a destination that exists (with kReplace: that is no model and not
  // empty), that is the source or holds it, or that cannot be made. kReplace also removes an
  // unfinished conversion.
  ResultDirectory(const std::filesystem::path& destination, const std::filesystem::path& source,
                  ExistingModel existing);

  const std::filesystem::path& final_path() const { return final_; }
  const std::filesystem::path& unfinished() const { return unfinished_; }
  // Whether nobody had begun it before.
  bool is_new() const { return !made_.empty(); }
  // Throws Error(kFileWrite) if the disk has not as much room.
  void require_room(uint64_t bytes) const;
  // Removes what an ended process left behind: all files but these.
  void remove_all_but(const std::vector<std::string>& names) const;
  // Copies the files beside the tensors, such as the tokenizer's. Returns the names of those that
  // are left out: other weights, and folders. Throws Error(kPathEscape) for links that leave the
  // model.
  std::vector<std::string> copy_other_files(
      const std::filesystem::path& source,
      const std::function<bool(const std::string&)>& holds_tensors) const;
  // Removes the unfinished directory with all that is in it, and parents that were made for it.
  void discard() const;
  // Gives the directory its name, in one step.
  void publish() const;

 private:
  void make_unfinished();
  void remove_empty_parents() const;

  std::filesystem::path final_;
  std::filesystem::path unfinished_;
  std::vector<std::filesystem::path> made_;  // by this conversion, the innermost first
};

// Writes a file that is on the disk when it returns. Throws Error(kFileWrite).
void write_durably(const std::filesystem::path& path, std::string_view text);

}  // namespace conclave::inline v0::conversion
