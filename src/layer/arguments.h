// First step of a forward: every check of the caller's arguments, before anything is written.
#pragma once

#include "routing/router.h"

#include "conclave/layer.h"

#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace conclave::inline v0 {

// Throws Error naming the argument, what was expected and what was found: shapes, types, strides,
// overlaps, and that there is one source of routing. Reads nothing that a pointer points to.
void check_tensors(const ForwardArgs& args, const MoeSpec& spec,
                   const routing::RouterTraits& traits);

// Runs check_tensors and checks the values in host memory. Returns the number of tokens that count:
// T, or *num_tokens if given.
int64_t check_arguments(const ForwardArgs& args, const MoeSpec& spec,
                        const routing::RouterTraits& traits);

// Checks ForwardArgs::rank_tokens, if given: a number for each rank of the split, and this rank's
// is that of its rows. Throws Error(kShape), Error(kInvalidArgument).
void check_rank_tokens(const ForwardArgs& args, const ParallelSpec& parallel);

// Checks the caller's ids under IdPolicy::kStrict: -1, [0, E + Z) in the first k slots, E + i in
// slot k + i of SharedMode::kFusedSlots. Throws Error(kExpertId) naming token and slot.
void check_ids_strict(const ConstTensorView& topk_ids, int64_t num_tokens, const MoeSpec& spec);

// True if slot `slot` of a token may hold `id`: an expert, a zero expert, or in the slots from k on
// the shared expert of that slot. Other ids contribute nothing; of these only -1 is legal.
bool is_slot_id(const MoeSpec& spec, int64_t slot, int64_t id);

// Checks a matrix [rows, cols] for an allowed type, alignment, and a stride that keeps rows apart
// and addressable. Throws Error naming it.
void check_matrix(std::string_view name, const ConstTensorView& tensor, const Shape& shape,
                  std::initializer_list<DType> dtypes);
// Checks a vector [size] likewise; the caller knows that it has data.
void check_vector(std::string_view name, const ConstTensorView& tensor, int64_t size,
                  std::initializer_list<DType> dtypes);

// One id, read from an int32 or int64 tensor.
int64_t load_id(const ConstTensorView& ids, int64_t token, int64_t slot);
int64_t load_token_id(const ConstTensorView& token_ids, int64_t token);

}  // namespace conclave::inline v0
