#include "convert/json_text.h"

#include "conclave/convert.h"

#include <nlohmann/json.hpp>

namespace conclave::inline v0 {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const ConvertedMatrix& matrix) {
  return {{"name", matrix.name},
          {"layer", matrix.layer},
          {"kind", matrix.kind},
          {"rows", matrix.rows},
          {"cols", matrix.cols},
          {"format", matrix.format},
          {"bytes_before", matrix.bytes_before},
          {"bytes_after", matrix.bytes_after},
          {"relative_error", matrix.error.relative()},
          {"worst_steps", matrix.error.worst_steps}};
}

Json json_of(const ConvertedLayer& layer) {
  return {{"layer", layer.layer},
          {"median", layer.median},
          {"worst", layer.worst},
          {"worst_token", layer.worst_token},
          {"tokens", layer.tokens}};
}

}  // namespace

std::string to_json(const ConversionReport& report) {
  Json json = {{"source", report.source},
               {"destination", report.destination},
               {"model_type", report.model_type},
               {"format", report.format},
               {"scales", report.scales},
               {"tokens", report.tokens},
               {"seed", report.seed},
               {"input", report.input},
               {"bytes_before", report.bytes_before},
               {"bytes_after", report.bytes_after},
               {"shards", report.shards},
               {"shards_kept", report.shards_kept},
               {"left_out", report.left_out},
               {"layers_alone", !report.incomplete.empty()},
               {"incomplete", report.incomplete},
               {"no_tokenizer", report.no_tokenizer},
               {"tensors_left_out", report.tensors_left_out},
               {"layers", Json::array()},
               {"matrices", Json::array()}};
  for (const ConvertedLayer& layer : report.layers) json["layers"].push_back(json_of(layer));
  for (const ConvertedMatrix& matrix : report.matrices) {
    json["matrices"].push_back(json_of(matrix));
  }
  return conversion::json_text(json, 1) + "\n";
}

}  // namespace conclave::inline v0
