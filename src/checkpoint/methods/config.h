// Values of a quantisation's configuration that several methods share.
#pragma once

#include "checkpoint/methods/method.h"
#include "io/json.h"

#include "conclave/spec.h"

#include <cstdint>
#include <string>
#include <string_view>

namespace conclave::inline v0::checkpoint {

std::string text_of(const io::JsonValue& object, std::string_view key, std::string_view otherwise);
bool flag_of(const io::JsonValue& object, std::string_view key, bool otherwise);
// Throws Error(kConfigValue) for a size below 1 or above 2^20.
int64_t block_size(const io::JsonValue& value);
int64_t checked_block(const io::JsonValue& value, int64_t size);

void set_block(QuantSpec& spec, int64_t rows, int64_t cols);
void set_block(const io::JsonValue& sizes, QuantSpec& spec);       // [rows, columns]
void set_block_text(const io::JsonValue& value, QuantSpec& spec);  // "128x128"
// Groups of columns of one row; -1 means the whole row.
void set_group(const io::JsonValue& size, QuantSpec& spec);
// The same of a size that stands for it; errors name the value.
void set_group(const io::JsonValue& value, int64_t size, QuantSpec& spec);
// The key that a value of the configuration stands below.
GroupKey key_of(const io::JsonValue& value);
// Rows that are quantised as they come; their groups follow the blocks of the weights.
void set_dynamic_rows(QuantSpec& spec);

// Rows in groups of columns that are codes of this type, with scales by this rule.
void set_scaled_rows(DType rows, int64_t group, RowScaleRule rule, QuantizedWeights& weights);

// Throws NotRead for codes that a tool has laid in the order of a kernel. The order is that of the
// layout's name, or is called otherwise.
[[noreturn]] void refuse_layout(std::string_view layout, std::string_view kernel_order = {});

// A note for the user where a method asks for coded rows and layers do without.
inline constexpr std::string_view kPlainRows =
    "rows stay as they are, where the method would quantise them too";

// Codes under the usual names.
QuantizedWeights usual_codes(DType element, const QuantSpec& spec);

}  // namespace conclave::inline v0::checkpoint
