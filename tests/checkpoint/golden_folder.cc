#include "checkpoint/golden_folder.h"

#include "conclave/safetensors.h"

#include <fstream>

namespace conclave::testing {

TinyModel read_folder(const std::filesystem::path& folder) {
  TinyModel model;
  std::ifstream config(folder / "config.json");
  model.config = nlohmann::json::parse(config);
  const SafetensorsFile file = SafetensorsFile::open(folder / "model.safetensors");
  for (const TensorInfo& info : file.tensors()) {
    TinyTensor& tensor = model.add(info.name, info.dtype, info.shape);
    tensor.bytes.resize(info.bytes);
    file.read(info, 0, tensor.bytes);
  }
  return model;
}

TinyModel golden_folder(const std::string& name) {
  return read_folder(std::filesystem::path("testdata/quantised") / name);
}

}  // namespace conclave::testing
