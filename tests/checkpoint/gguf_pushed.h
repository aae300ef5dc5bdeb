// GGUF models of testdata as programs push them: their headers, and their tensors one by one.
#pragma once

#include "checkpoint/tiny_model.h"

#include "conclave/checkpoint.h"
#include "conclave/gguf.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::testing {

using Bytes = std::vector<std::byte>;

inline const std::filesystem::path kGgufModels = "testdata/gguf";

Bytes bytes_of_file(const std::filesystem::path& path);

// A tensor that a header lists, of values of 32 bits.
struct Listed {
  std::string name;
  std::vector<uint64_t> dims;  // the length of a row first
};

// The header of a model without its list of tensors, or with another, as a program would write it.
Bytes keys_of(const GgufReader& model, const std::vector<GgufKey>& others = {},
              const std::vector<Listed>& listed = {});

struct PushedTensor {
  std::string name;
  uint32_t type = 0;
  Shape shape;
  Bytes bytes;

  GgufTensorView view() const { return {.type = type, .shape = shape, .bytes = bytes}; }
};

std::vector<PushedTensor> tensors_of(const GgufReader& model);

struct PushedModel {
  explicit PushedModel(const std::string& name);

  // With the list of tensors, of all parts; the first part's bytes go on to its end.
  CheckpointFeed feed_with_list() const;
  CheckpointFeed feed_without_list() const { return CheckpointFeed::from_gguf(keys_of(reader)); }

  const PushedTensor& tensor(std::string_view name) const;
  // The names of the tensors that MoE layers have a use for.
  std::set<std::string> wanted() const;

  std::vector<std::filesystem::path> files;
  GgufReader reader;
  Checkpoint checkpoint;
  std::vector<PushedTensor> tensors;
};

// Nothing but a key or the list can say that experts read a projection, so it comes before them.
void put_projections_first(std::vector<PushedTensor>& tensors);
void put_all(CheckpointFeed& feed, const std::vector<PushedTensor>& tensors,
             FeedMemory memory = FeedMemory::kCopy);
Bytes matrix_bytes(const WeightSource& source, WeightId id, int64_t expert);
// The feed is complete, and its layers have the specs and the bits of the checkpoint's.
void expect_layers_of(const CheckpointFeed& feed, const Checkpoint& checkpoint);

}  // namespace conclave::testing
