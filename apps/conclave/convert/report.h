// The report of a conversion: conversion.html beside the model, and a table.
#pragma once

#include "conclave/convert.h"

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

namespace conclave::tool {

// The matrices of one kind in one layer, over all experts.
struct KindSummary {
  std::string kind;  // "gate", "shared_down"
  int64_t layer = 0;
  int64_t count = 0;
  double median = 0;  // relative error
  double worst = 0;
  double worst_steps = 0;
};
std::vector<KindSummary> summarise(const ConversionReport& report);

// The forms that matrices have, that of the conversion first: "q4_0, some q8_0".
std::string forms_text(const ConversionReport& report);

// Throws Error(kFileWrite).
void write_page(const ConversionReport& report, const std::filesystem::path& directory);
void print_report(const ConversionReport& report, std::FILE* out);

}  // namespace conclave::tool
