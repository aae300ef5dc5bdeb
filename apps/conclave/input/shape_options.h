// Selects a layer by preset or by its sizes: --model, or -E -k -H -I.
#pragma once

#include "command_line.h"

#include "conclave/spec.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::tool {

struct ShapeOptions {
  std::string models;  // presets, separated by commas
  int64_t num_experts = 0;
  int64_t top_k = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t shared_size = 0;
  std::string dtype;
  std::string rows;  // "int8": rows that the spec leaves as they are become codes
};
// Adds -E -k -H -I, --shared and --dtype.
// Which types of weights --dtype takes: those of checkpoints that are written here, "int4-group128"
// and others of any checkpoint in a directory, or also "Q4_K" and other blocks of GGUF files.
enum class TypesOf { kWritten, kDirectories, kAnyFile };
void add_shape_options(Command& command, ShapeOptions& options, TypesOf types);
// Whether random weights of checkpoints that are written here are drawn in a form of this name;
// others are made of values.
bool has_drawn_form(const std::string& name);
void add_model_option(Command& command, ShapeOptions& options, const std::string& default_note);

// Adds --rows.
void add_rows_option(Command& command, std::string& rows);
// The spec with rows as the option says; "" leaves them. Throws Error(kInvalidArgument) that names
// the option, and the model that the spec is of.
MoeSpec with_rows(const std::string& rows, const MoeSpec& spec, const std::string& model = {});

struct NamedShape {
  std::string name;        // "qwen3-30b-a3b", or "E128.k8.H2048.I768"
  std::string model_type;  // from the preset; empty for sizes
  int64_t num_layers = 1;
  std::string note;
  MoeSpec spec;
};
// Throws Error(kUnknownName) listing the presets, or Error(kInvalidArgument) if a size is missing
// or both ways are mixed.
std::vector<NamedShape> resolve_shapes(const ShapeOptions& options);
bool any_size_given(const ShapeOptions& options);
// Throws Error(kInvalidArgument) for an option that a model's own layers say, all but --rows.
void refuse_shape_beside(const std::string& model, const ShapeOptions& options);

// Sets the type and, for codes, the quantisation. Throws Error(kInvalidArgument).
void set_weight_type(const std::string& name, MoeSpec& spec);

// Returns "E=128 k=8 H=2048 I=768 BF16", with the shared expert if there is one.
std::string shape_text(const MoeSpec& spec);

}  // namespace conclave::tool
