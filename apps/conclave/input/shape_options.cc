#include "input/shape_options.h"

#include "spec_text.h"

#include "conclave/convert.h"
#include "conclave/error.h"
#include "conclave/format.h"
#include "conclave/gguf.h"
#include "conclave/synthetic.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace conclave::tool {
namespace {

std::string preset_names() {
  std::string names;
  for (const ModelPreset& preset : model_presets()) {
    names += (names.empty() ? "" : ", ") + std::string(preset.name);
  }
  return names;
}

NamedShape from_preset(const std::string& name) {
  const ModelPreset* preset = find_preset(name);
  if (preset == nullptr) {
    throw Error(ErrorCode::kUnknownName, {.what = "no preset of this name",
                                          .tensor = "--model",
                                          .expected = "one of " + preset_names(),
                                          .found = fmt::format("'{}'", name)});
  }
  return {.name = name,
          .model_type = std::string(preset->model_type),
          .num_layers = preset->num_hidden_layers,
          .note = std::string(preset->note),
          .spec = preset->spec};
}

NamedShape from_sizes(const ShapeOptions& options) {
  const std::pair<const char*, int64_t> sizes[] = {{"-E", options.num_experts},
                                                   {"-k", options.top_k},
                                                   {"-H", options.hidden_size},
                                                   {"-I", options.intermediate_size}};
  for (const auto& [flag, value] : sizes) {
    if (value != 0) continue;
    throw Error(ErrorCode::kInvalidArgument, {.what = fmt::format("{} is missing", flag),
                                              .expected = "-E, -k, -H and -I together"});
  }
  NamedShape shape;
  shape.name = fmt::format("E{}.k{}.H{}.I{}", options.num_experts, options.top_k,
                           options.hidden_size, options.intermediate_size);
  shape.spec.num_experts = options.num_experts;
  shape.spec.top_k = options.top_k;
  shape.spec.hidden_size = options.hidden_size;
  shape.spec.intermediate_size = options.intermediate_size;
  return shape;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (true) {
    const size_t comma = text.find(',', begin);
    parts.push_back(text.substr(begin, comma - begin));
    if (comma == std::string::npos) return parts;
    begin = comma + 1;
  }
}

std::vector<WeightForm> all_forms() {
  std::vector<WeightForm> forms = weight_forms();
  for (const WeightForm& form : gguf_block_forms()) forms.push_back(form);
  for (const WeightForm& form : gguf_mixed_forms()) forms.push_back(form);
  return forms;
}

std::vector<WeightForm> forms_of(TypesOf types) {
  if (types == TypesOf::kAnyFile) return all_forms();
  std::vector<WeightForm> forms = weight_forms();
  if (types != TypesOf::kWritten) return forms;
  std::erase_if(forms, [](const WeightForm& form) {
    return form.quant.weights != WeightScale::kNone && form.method.empty();
  });
  return forms;
}

std::vector<std::string> names_of(const std::vector<WeightForm>& forms) {
  std::vector<std::string> names;
  for (const WeightForm& form : forms) names.emplace_back(form.name);
  return names;
}

// Forms that are drawn, and those that are made of values, with their options.
std::vector<std::string> written_names() {
  std::vector<std::string> names = names_of(forms_of(TypesOf::kWritten));
  for (std::string& name : random_model_formats()) {
    if (std::ranges::find(names, name) == names.end()) names.push_back(std::move(name));
  }
  return names;
}

}  // namespace

bool has_drawn_form(const std::string& name) {
  return std::ranges::any_of(forms_of(TypesOf::kWritten),
                             [&](const WeightForm& form) { return form.name == name; });
}

void add_model_option(Command& command, ShapeOptions& options, const std::string& default_note) {
  command.text("-m,--model", "PRESET", options.models,
               fmt::format("Sizes of a known model: {}{}", preset_names(), default_note));
}

void add_shape_options(Command& command, ShapeOptions& options, TypesOf types) {
  constexpr Limits kSizes{1, int64_t{1} << 24};
  command.number("-E,--experts", "N", options.num_experts, kSizes, "Number of experts");
  command.number("-k,--top-k", "N", options.top_k, kSizes, "Experts per token");
  command.number("-H,--hidden", "N", options.hidden_size, kSizes, "Hidden size");
  command.number("-I,--intermediate", "N", options.intermediate_size, kSizes,
                 "Intermediate size of one expert");
  command.number("--shared", "N", options.shared_size, kSizes,
                 "Intermediate size of a shared expert");
  if (types == TypesOf::kWritten) {
    command.choice_with_options("--dtype", options.dtype, written_names(),
                                "Type of the weights (default: the preset's, or bf16); some forms "
                                "take options, as gptq-int4:group=64,asym");
    return;
  }
  const bool blocks = types == TypesOf::kAnyFile;
  Option dtype = command.choice(
      "--dtype", options.dtype, names_of(forms_of(types)),
      fmt::format(
          "Type of the weights{} (default: the preset's, or bf16)",
          blocks
              ? "; BLOCKS is a type of GGUF files, such as Q4_K, or Q4_K+Q6_K with another for down"
              : ""));
  if (blocks) dtype.shown_as(fmt::format("{}|BLOCKS", fmt::join(names_of(weight_forms()), "|")));
}

void add_rows_option(Command& command, std::string& rows) {
  command.choice("--rows", rows, {"int8", "plain"},
                 "Type of rows: int8 in groups of 32 where the weights' form leaves them as they "
                 "are, beside int8, int4 and 4-bit float weights; plain: as they are, whatever the "
                 "form says");
}

MoeSpec with_rows(const std::string& rows, const MoeSpec& spec, const std::string& model) {
  if (rows.empty()) return spec;
  if (rows == "plain") return with_plain_rows(spec);
  try {
    return with_int8_rows(spec);
  } catch (const Error& error) {
    ErrorDetail detail = error.detail();
    if (!detail.tensor.empty()) detail.what += " (" + detail.tensor + ")";
    if (detail.hint.empty()) detail.hint = "leave --rows out, or give --rows plain";
    detail.tensor = "--rows int8";
    detail.file = model;
    throw Error(error.code(), std::move(detail));
  }
}

bool any_size_given(const ShapeOptions& options) {
  return options.num_experts != 0 || options.top_k != 0 || options.hidden_size != 0 ||
         options.intermediate_size != 0;
}

void refuse_shape_beside(const std::string& model, const ShapeOptions& options) {
  struct Given {
    const char* option;
    bool is_given;
  };
  const std::array all = {Given{"--model", !options.models.empty()},
                          Given{"--experts", options.num_experts != 0},
                          Given{"--top-k", options.top_k != 0},
                          Given{"--hidden", options.hidden_size != 0},
                          Given{"--intermediate", options.intermediate_size != 0},
                          Given{"--shared", options.shared_size != 0},
                          Given{"--dtype", !options.dtype.empty()}};
  const auto given = std::ranges::find(all, true, &Given::is_given);
  if (given == all.end()) return;
  throw Error(ErrorCode::kInvalidArgument, {.what = "the model's own layers say this",
                                            .file = model,
                                            .tensor = given->option,
                                            .expected = "either MODEL_DIR, or a preset or sizes"});
}

std::vector<NamedShape> resolve_shapes(const ShapeOptions& options) {
  std::vector<NamedShape> shapes;
  if (!options.models.empty()) {
    if (any_size_given(options)) {
      throw Error(ErrorCode::kInvalidArgument,
                  ErrorDetail{.what = "a preset and sizes exclude each other",
                              .expected = "either --model, or -E, -k, -H and -I"});
    }
    for (const std::string& name : split(options.models)) shapes.push_back(from_preset(name));
  } else {
    shapes.push_back(from_sizes(options));
  }
  for (NamedShape& shape : shapes) {
    if (!options.dtype.empty()) set_weight_type(options.dtype, shape.spec);
    if (options.shared_size != 0) {
      shape.spec.shared = {.mode = SharedMode::kSigmoidGate,
                           .intermediate_size = options.shared_size};
    }
    shape.spec = with_rows(options.rows, shape.spec);
    validate(shape.spec);
  }
  return shapes;
}

void set_weight_type(const std::string& name, MoeSpec& spec) {
  for (const WeightForm& form : all_forms()) {
    if (name != form.name) continue;
    spec.weight_dtype = form.dtype;
    spec.quant = form.quant;
    return;
  }
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "unknown weight type",
               .tensor = "--dtype",
               .expected = fmt::format("one of {}", fmt::join(names_of(all_forms()), ", ")),
               .found = fmt::format("'{}'", name)});
}

std::string shape_text(const MoeSpec& spec) {
  std::string text = fmt::format("E={} k={} H={} I={}", spec.num_experts, spec.top_k,
                                 spec.hidden_size, spec.intermediate_size);
  if (spec.shared.mode != SharedMode::kNone) {
    text += fmt::format(" shared={}", spec.shared.intermediate_size);
    if (spec.shared.count != 1) text += fmt::format("x{}", spec.shared.count);
  }
  if (spec.num_zero_experts != 0) text += fmt::format(" Z={}", spec.num_zero_experts);
  if (spec.latent.size != 0) text += fmt::format(" latent={}", spec.latent.size);
  if (spec.residual.intermediate_size != 0) {
    text += fmt::format(" residual={}", spec.residual.intermediate_size);
  }
  return text + " " + weights_text(spec);
}

}  // namespace conclave::tool
