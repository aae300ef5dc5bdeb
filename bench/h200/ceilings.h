// What the memory of the GPU gives to a kernel that only reads.
#pragma once

namespace conclave::bench {

// Best of several reads of 8 GB, in 1e12 bytes a second.
double read_stream_tbps();

}  // namespace conclave::bench
