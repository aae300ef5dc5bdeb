// Codes that fill words of 32 bits, the lowest bits first: "w1.weight_packed" [rows, words], and
// beside it "w1.weight_shape", which says again what the configuration says.
#pragma once

#include "checkpoint/quantization.h"
#include "checkpoint/tensor_table.h"

#include <optional>
#include <string_view>

namespace conclave::inline v0::checkpoint {

// The name of the matrix whose words have this name; others as they are.
std::string_view matrix_name(const std::optional<QuantizedWeights>& quant, std::string_view name);
// The usual name of the words of a matrix.
std::string words_name(std::string_view matrix);
// Whether a tensor repeats the shape of a matrix in words.
bool repeats_shape(const std::optional<QuantizedWeights>& quant, std::string_view name);

// Describes a tensor of words by its codes, under its own name; others as they are.
TensorInfo as_codes(const std::optional<QuantizedWeights>& quant, TensorInfo info);
// Does that with every tensor of a table.
void describe_codes(const std::optional<QuantizedWeights>& quant, TensorTable& table);

}  // namespace conclave::inline v0::checkpoint
