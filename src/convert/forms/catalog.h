// The forms that conversions write, by the name that users give them.
#pragma once

#include "convert/forms/target_form.h"
#include "convert/source_model.h"

#include "conclave/quantise.h"

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::conversion {

// An option follows a name: "group=64" has a value, "asym" has none.
using FormOptions = std::map<std::string, std::string, std::less<>>;

using FormPointer = std::shared_ptr<const TargetForm>;

// A row of the catalog. A name may stand once for each container.
struct FormRow {
  std::string name;
  ModelContainer container = ModelContainer::kSafetensors;
  std::string method = {};  // quant_method; empty: blocks, or values
  bool has_codes = true;
  // Whether other linear layers of a model may have other forms.
  bool mixes = false;
  // Only random models have the form: it asks for what a model's weights do not tell.
  bool of_random_models = false;
  bool of_one_family = false;
  std::string options = {};  // as help shows them
  // Takes the options that it knows out of `options`.
  std::function<FormPointer(FormOptions& options, ScaleRule rule)> make;
};

// The rows of each kind of form, in files of their own.
std::vector<FormRow> scheme_forms();
std::vector<FormRow> plain_forms();
std::vector<FormRow> gptq_forms();
std::vector<FormRow> awq_forms();
std::vector<FormRow> bitsandbytes_forms();
std::vector<FormRow> mlx_forms();
std::vector<FormRow> gpt_oss_forms();
std::vector<FormRow> gguf_forms();

// The methods that forms are stored by, each once.
std::vector<std::string> form_methods();

// The container, if only one has a form that is called so; values are converted to in directories.
std::optional<ModelContainer> only_container_of(std::string_view text);

// "NAME" or "NAME:OPTION,OPTION" for results of a container, `source` being that of the model.
// Throws Error(kUnknownName) for names that it does not have, and Error(kInvalidArgument) for
// options. Values are a form where a directory is made of a GGUF file.
FormPointer parse_form(const std::string& text, ModelContainer source, ModelContainer container,
                       ScaleRule rule);
// The form of a random model. Throws likewise.
FormPointer parse_random_form(const std::string& text, ModelContainer container);
// The form of a KeepRule: values, or codes where such forms mix. Throws
// likewise.
FormPointer parse_kept_form(const std::string& text, ModelContainer container, ScaleRule rule);

}  // namespace conclave::inline v0::conversion
