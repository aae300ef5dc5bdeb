// Options that forms of several methods take.
#pragma once

#include "convert/forms/catalog.h"

#include <cstdint>
#include <string>

namespace conclave::inline v0::conversion {

// Takes words and values out of the options of a form, and adds them to its name.
class OptionTaker {
 public:
  OptionTaker(FormOptions& options, std::string name) : options_(options), name_(std::move(name)) {}

  // "group=N", or "group=row", which is 0. Throws Error(kInvalidArgument) for other values.
  void take_group(int64_t& group);
  // Whether the word stands there.
  bool take(const std::string& word);

  const std::string& name() const { return name_; }  // with the options that were taken

 private:
  void add(const std::string& text);

  FormOptions& options_;
  std::string name_;
};

}  // namespace conclave::inline v0::conversion
