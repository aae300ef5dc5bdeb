// How ranks of one machine that share nothing else tell each other where they are: by files.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace conclave::tool {

// Exchanges of texts, as ConnectOptions::exchange wants them. The ranks of a launch have the same
// folder, which whoever comes first makes, for this user alone. Texts that an earlier launch has
// left there are not taken: their writers have ended.
class FileMeeting {
 public:
  // Throws Error(kFileWrite) where the folder cannot be made, or somebody else could write there.
  FileMeeting(std::string folder, int32_t rank, int32_t size, std::chrono::nanoseconds timeout);
  FileMeeting(const FileMeeting&) = delete;
  FileMeeting& operator=(const FileMeeting&) = delete;
  // Takes this rank's texts back, and the folder with the last ones. In a meeting that has come
  // through, once every rank has read them.
  ~FileMeeting();

  // The texts of all ranks, in rank order. Throws CommError(kCommTimeout) naming a rank that has
  // not come in time; Error(kFileWrite).
  std::vector<std::string> exchange(const std::string& mine);

 private:
  std::string own_text(int32_t round) const;

  std::string folder_;
  int32_t rank_;
  int32_t size_;
  std::chrono::nanoseconds timeout_;
  int32_t round_ = 0;
};

}  // namespace conclave::tool
