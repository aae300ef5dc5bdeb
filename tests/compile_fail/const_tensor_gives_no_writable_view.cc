#include "conclave/tensor.h"

conclave::ConstTensorView read(const conclave::Tensor& tensor) { return tensor.view(); }
#ifdef CONCLAVE_MUST_NOT_COMPILE
conclave::TensorView write(const conclave::Tensor& tensor) { return tensor.view(); }
#endif
