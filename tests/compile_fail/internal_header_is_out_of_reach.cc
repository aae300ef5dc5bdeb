#include "conclave/tensor.h"

#ifdef CONCLAVE_MUST_NOT_COMPILE
#include "core/checked.h"
#endif
