#include "checkpoint/golden_folder.h"

#include "conclave/safetensors.h"

#include <filesystem>
#include <fstream>

namespace conclave::testing {

TinyModel golden_folder(const std::string& name) {
  TinyModel model;
  const std::filesystem::path from = std::filesystem::path("testdata/quantised") / name;
  std::ifstream config(from / "config.json");
  model.config = nlohmann::json::parse(config);
  const SafetensorsFile file = SafetensorsFile::open(from / "model.safetensors");
  for (const TensorInfo& info : file.tensors()) {
    TinyTensor& tensor = model.add(info.name, info.dtype, info.shape);
    tensor.bytes.resize(info.bytes);
    file.read(info, 0, tensor.bytes);
  }
  return model;
}

}  // namespace conclave::testing
