#include "output/results_file.h"

#include "conclave/version.h"

#include <fmt/format.h>

#include <span>

namespace conclave::tool {
namespace {

std::span<const std::byte> bytes_of(const Tensor& tensor) {
  return {tensor.as<std::byte>(), tensor.size_bytes()};
}

}  // namespace

ResultsFile::ResultsFile(const std::filesystem::path& path, const std::vector<ResultShape>& layers)
    : writer_(path, {{"made_by", fmt::format("conclave {}", build_info().version)}}) {
  for (const ResultShape& layer : layers) {
    const std::string prefix = fmt::format("layers.{}.", layer.layer);
    const MoeSpec& spec = layer.spec;
    writer_.declare(prefix + "output", layer.output_dtype, {layer.num_tokens, spec.hidden_size});
    writer_.declare(prefix + "topk_ids", DType::kI32, {layer.num_tokens, num_slots(spec)});
    writer_.declare(prefix + "topk_weights", DType::kF32, {layer.num_tokens, num_slots(spec)});
    if (layer.has_logits) {
      writer_.declare(prefix + "router_logits", DType::kF32, {layer.num_tokens, num_logits(spec)});
    }
  }
  // Creates the file now, so that a path that cannot be written fails before any work.
  writer_.write({});
}

void ResultsFile::write(const LayerRun& run) {
  writer_.write(bytes_of(run.output));
  writer_.write(bytes_of(run.topk_ids));
  writer_.write(bytes_of(run.topk_weights));
  if (run.has_logits()) writer_.write(bytes_of(run.logits));
}

}  // namespace conclave::tool
