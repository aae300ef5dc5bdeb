// Hop one of a forward: every check of the caller's arguments, before anything is written.
#pragma once

#include "conclave/layer.h"

#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace conclave::inline v0 {

// Throws Error naming the argument, what was expected and what was found: shapes, types, strides,
// overlaps, and that there is one source of routing. Reads nothing that a pointer points to.
void check_tensors(const ForwardArgs& args, const MoeSpec& spec);

// check_tensors, and the values in host memory. Returns the tokens that count: T, or *num_tokens
// where given.
int64_t check_arguments(const ForwardArgs& args, const MoeSpec& spec);

// Checks the caller's ids under IdPolicy::kStrict: -1, [0, E + Z) in the first k slots, E + i in
// slot k + i of SharedMode::kFusedSlots. Throws Error(kExpertId) naming token and slot.
void check_ids_strict(const ConstTensorView& topk_ids, int64_t num_tokens, const MoeSpec& spec);

// Whether slot `slot` of a token may hold `id`: an expert, a zero expert, or in the slots from k on
// the shared expert of that slot. Other ids contribute nothing, -1 by right.
bool is_slot_id(const MoeSpec& spec, int64_t slot, int64_t id);

// A matrix [rows, cols] of an allowed type: aligned, and its stride keeps rows apart and in reach.
// Throws Error naming it.
void check_matrix(std::string_view name, const ConstTensorView& tensor, const Shape& shape,
                  std::initializer_list<DType> dtypes);
// Likewise a vector [size]; the caller knows that it has data.
void check_vector(std::string_view name, const ConstTensorView& tensor, int64_t size,
                  std::initializer_list<DType> dtypes);

// One id, read from an int32 or int64 tensor.
int64_t load_id(const ConstTensorView& ids, int64_t token, int64_t slot);
int64_t load_token_id(const ConstTensorView& token_ids, int64_t token);

}  // namespace conclave::inline v0
