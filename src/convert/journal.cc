#include "convert/journal.h"

#include "convert/source_model.h"

#include "conclave/error.h"

#include <cerrno>
#include <fcntl.h>
#include <sstream>
#include <string_view>
#include <sys/file.h>
#include <system_error>
#include <unistd.h>

namespace conclave::inline v0::conversion {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, std::string what, std::string found,
                       std::string hint = {}) {
  throw Error(ErrorCode::kFileWrite, {.what = std::move(what),
                                      .file = path.string(),
                                      .found = std::move(found),
                                      .hint = std::move(hint)});
}

std::string system_message() { return std::generic_category().message(errno); }

nlohmann::ordered_json to_json(const ShardRecord& record) {
  nlohmann::ordered_json errors = nlohmann::ordered_json::array();
  for (const auto& [module, error] : record.errors) {
    errors.push_back({module, error.squared_error, error.squared_values, error.worst_steps});
  }
  return {{"shard", record.file_name}, {"checksum", record.checksum}, {"modules", errors}};
}

ShardRecord to_record(const nlohmann::ordered_json& line) {
  ShardRecord record{.file_name = line.at("shard").get<std::string>(),
                     .checksum = line.at("checksum").get<uint64_t>(),
                     .errors = {}};
  for (const auto& module : line.at("modules")) {
    record.errors[module.at(0).get<int32_t>()] = {.squared_error = module.at(1).get<double>(),
                                                  .squared_values = module.at(2).get<double>(),
                                                  .worst_steps = module.at(3).get<double>()};
  }
  return record;
}

}  // namespace

Journal::Journal(const std::filesystem::path& directory, const nlohmann::ordered_json& key)
    : path_(directory / kJournalFile) {
  descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (descriptor_ < 0) fail(path_, "cannot write the file", system_message());
  try {
    lock();
    if (!read(key)) append(key);
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
}

Journal::~Journal() { ::close(descriptor_); }

void Journal::lock() const {
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) == 0) return;
  fail(path_, "another process is converting to this directory", system_message());
}

bool Journal::read(const nlohmann::ordered_json& key) {
  const std::string text = whole_lines();
  std::istringstream lines(text);
  std::string line;
  if (!std::getline(lines, line)) return false;
  if (line != key.dump()) {
    fail(path_, "an unfinished conversion of another model, or to another form, is in the way",
         line.substr(0, 200), "ExistingModel::kReplace removes it");
  }
  while (std::getline(lines, line)) {
    try {
      ShardRecord record = to_record(nlohmann::ordered_json::parse(line));
      finished_[record.file_name] = std::move(record);
    } catch (const nlohmann::json::exception&) {
      // Whatever damaged the line, its shard is written again.
      continue;
    }
  }
  return true;
}

// A line that an end of the process cut off is taken away, so that the next one begins anew.
std::string Journal::whole_lines() {
  std::string text = read_whole_file(path_);
  const size_t size = text.rfind('\n') + 1;
  if (size == text.size()) return text;
  if (::ftruncate(descriptor_, static_cast<off_t>(size)) != 0) {
    fail(path_, "cannot write the file", system_message());
  }
  text.resize(size);
  return text;
}

void Journal::add(const ShardRecord& record) { append(to_json(record)); }

void Journal::append(const nlohmann::ordered_json& line) {
  std::string text = line.dump() + "\n";
  std::string_view rest = text;
  while (!rest.empty()) {
    const ssize_t put = ::write(descriptor_, rest.data(), rest.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail(path_, "cannot write the file", system_message());
    rest.remove_prefix(static_cast<size_t>(put));
  }
  if (::fsync(descriptor_) != 0) fail(path_, "cannot write the file", system_message());
}

}  // namespace conclave::inline v0::conversion
