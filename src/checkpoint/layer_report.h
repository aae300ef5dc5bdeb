// Says what a layer must have, what it lacks, and what is left over.
#pragma once

#include "checkpoint/layer_assignment.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

int64_t count_missing(const LayerAssignment& layer);
std::vector<std::string> list_missing(const LayerAssignment& layer, size_t limit);
// "NAME [rows, cols]" of the tensor that would hold the matrix.
std::string expected_name(const LayerAssignment& layer, WeightId matrix, int64_t expert);
std::string summary(const LayerAssignment& layer);  // "16 of 24 expert tensors of layer 3"

// Throws Error(kTensorUnexpected) for the first name of the MoE block that no pattern knows.
void check_strays(const LayerAssignment& layer);

}  // namespace conclave::inline v0::checkpoint
