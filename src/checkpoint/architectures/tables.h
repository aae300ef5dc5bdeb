// One declaration a family; the definitions lie one a file beside this one.
#pragma once

#include "checkpoint/architecture.h"

namespace conclave::inline v0::checkpoint {

extern const Architecture kMixtral;
extern const Architecture kQwen2Moe;
extern const Architecture kQwen3Moe;
extern const Architecture kOlmoe;

}  // namespace conclave::inline v0::checkpoint
