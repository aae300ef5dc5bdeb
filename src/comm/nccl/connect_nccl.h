// Ranks with a GPU each, which reach each other by NCCL.
#pragma once

#include "conclave/comm.h"
#include "conclave/error.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace conclave::inline v0::comm {

Support nccl_supports(const ConnectOptions& options);
std::unique_ptr<Communicator> connect_nccl(const ConnectOptions& options);
std::string nccl_library_text();  // "NCCL 2.28.3"
// Throws Error(kUnsupported): the ranks are the application's to start.
std::vector<std::string> nccl_launch(int32_t ranks);

}  // namespace conclave::inline v0::comm
