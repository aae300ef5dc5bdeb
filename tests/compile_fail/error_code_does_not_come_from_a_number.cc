#include "conclave/error.h"

conclave::ErrorCode named() { return conclave::ErrorCode::kShape; }
#ifdef CONCLAVE_MUST_NOT_COMPILE
conclave::ErrorCode numbered() { return 104; }
#endif
