// Measures the memory rate that the GPU gives to a kernel that only reads.
#pragma once

namespace conclave::bench {

// The best of several reads of 8 GB, in 1e12 bytes per second.
double read_stream_tbps();

}  // namespace conclave::bench
