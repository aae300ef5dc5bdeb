// The matrices of experts in a layer of a GGUF file, by the tensors that hold them.
#pragma once

#include "checkpoint/gguf/layer_tensors.h"

#include "conclave/checkpoint.h"

#include <vector>

namespace conclave::inline v0::checkpoint {

std::vector<StoredMatrix> name_gguf_matrices(const io::GgufFile& file, const GgufLayer& layer);

}  // namespace conclave::inline v0::checkpoint
