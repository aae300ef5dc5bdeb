#include "conclave/tensor.h"

const void* read(conclave::ConstTensorView view) { return view.data; }
#ifdef CONCLAVE_MUST_NOT_COMPILE
void* write(conclave::ConstTensorView view) { return view.data; }
#endif
