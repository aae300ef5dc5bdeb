// Reads a tensor of the trunk a few rows at a time, in the type and order that the result has.
#pragma once

#include "convert/module.h"
#include "convert/source_model.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace conclave::inline v0::conversion {

// The bytes of a moved tensor come in this many pieces, one after the other: rows that fit memory,
// or a head where rows of a head change places.
int64_t count_pieces(const PlannedTensor& tensor);
// May be called from several threads. Throws Error(kFileRead, kFileChanged).
std::vector<std::byte> read_piece(const SourceModel& source, const PlannedTensor& tensor,
                                  int64_t piece);

}  // namespace conclave::inline v0::conversion
