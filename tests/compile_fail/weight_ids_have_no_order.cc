#include "conclave/weights.h"

bool is_gate(conclave::WeightId id) {
#ifdef CONCLAVE_MUST_NOT_COMPILE
  return id <= conclave::weights::kGate;
#else
  return id == conclave::weights::kGate;
#endif
}
