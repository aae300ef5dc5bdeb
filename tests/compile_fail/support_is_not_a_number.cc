#include "conclave/error.h"

bool ask(const conclave::Support& support) { return static_cast<bool>(support); }
#ifdef CONCLAVE_MUST_NOT_COMPILE
int count(const conclave::Support& support) { return support; }
#endif
