#include "routing/router.h"

namespace conclave::inline v0 {

size_t Router::scratch_bytes(int32_t /*workers*/) const { return 0; }

}  // namespace conclave::inline v0
