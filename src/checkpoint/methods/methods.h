// The readers and writers of the methods' configurations, for their table.
#pragma once

#include "checkpoint/methods/method.h"

namespace conclave::inline v0::checkpoint {

QuantizedWeights read_fp8(const io::JsonValue& config);
std::string write_fp8(const MethodForm& form, const std::vector<std::string>& kept);
QuantizedWeights read_fp4_experts(const io::JsonValue& config);
QuantizedWeights read_compressed_tensors(const io::JsonValue& config);
std::string write_compressed_tensors(const MethodForm& form, const std::vector<std::string>& kept);
QuantizedWeights read_modelopt(const io::JsonValue& config);
QuantizedWeights read_gptq(const io::JsonValue& config);
std::string write_gptq(const MethodForm& form, const std::vector<std::string>& kept);
QuantizedWeights read_awq(const io::JsonValue& config);
std::string write_awq(const MethodForm& form, const std::vector<std::string>& kept);
QuantizedWeights read_auto_round(const io::JsonValue& config);
QuantizedWeights read_mxfp4(const io::JsonValue& config);
std::string write_mxfp4(const MethodForm& form, const std::vector<std::string>& kept);
QuantizedWeights read_bitsandbytes(const io::JsonValue& config);
std::string write_bitsandbytes(const MethodForm& form, const std::vector<std::string>& kept);
QuantizedWeights read_quark(const io::JsonValue& config);
QuantizedWeights read_mlx(const io::JsonValue& config);
bool wrote_mlx(const io::JsonValue& config);
std::string write_mlx(const MethodForm& form, const std::vector<std::string>& kept);

// How codes of a layer's spec are stored usually; nothing if that is as the spec says.
std::optional<QuantizedWeights> usual_storage(DType element, const QuantSpec& spec);

}  // namespace conclave::inline v0::checkpoint
