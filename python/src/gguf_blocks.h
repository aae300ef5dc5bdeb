// conclave._conclave.GgufBlocks: a layer of arrays that hold blocks of GGUF files.
#pragma once

#include "arrays.h"
#include "binding.h"

#include "conclave/gguf_blocks.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::python {

class PyGgufBlocks {
 public:
  explicit PyGgufBlocks(const MoeSpec& spec) : blocks_(spec) {}

  // Keeps the array, which must be dense and on the host.
  void put(const std::string& name, int64_t expert, const std::string& type, nb::handle rows);
  const GgufBlocks& blocks() const noexcept { return blocks_; }

 private:
  GgufBlocks blocks_;
  std::vector<Array> kept_;
};

void bind_gguf_blocks(nb::module_& module);

}  // namespace conclave::python
