#include "conclave/context.h"

conclave::Context take(conclave::Context&& context) {
  return static_cast<conclave::Context&&>(context);
}
#ifdef CONCLAVE_MUST_NOT_COMPILE
conclave::Context copy(const conclave::Context& context) { return context; }
#endif
