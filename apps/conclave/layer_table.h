// The table of run and verify: one row per layer, a line of totals, the reasons for failures.
#pragma once

#include "checks.h"
#include "layer_run.h"
#include "output/table.h"
#include "ranks/rank_team.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::tool {

// Adds the ranks of a team, if there are several, to the facts of a table.
void add_facts(const RankTeam& team, nlohmann::ordered_json& facts);

struct LayerRow {
  int64_t layer = 0;
  MoeSpec spec;
  int64_t tokens = 0;
  LayerWork work;
  double ms = 0;
  WeightMemory weights = {};
  CheckResult check;
};

// Adds up the rows. Speeds are left out if nothing was timed.
class LayerTable {
 public:
  enum class Speeds : uint8_t { kShown, kHidden };
  LayerTable(std::FILE* out, OutputFormat format, Speeds speeds);

  TableWriter& writer() { return writer_; }
  void add(const LayerRow& row);
  // Prints total, failures and the closing line; returns whether all layers passed.
  bool finish();

 private:
  std::vector<Cell> cells(const LayerRow& row) const;

  Speeds speeds_;
  TableWriter writer_;
  int64_t layers_ = 0;
  int64_t failures_ = 0;
  LayerRow sum_;
  std::vector<std::string> reasons_;
  std::vector<std::string> packed_because_;
};

}  // namespace conclave::tool
