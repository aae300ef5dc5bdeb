// Ranks that are processes on any hosts, or threads, which tell each other where they are.
#pragma once

#include "comm/message/verdict.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace conclave::inline v0::comm {

Support tcp_supports(const ConnectOptions& options);
std::unique_ptr<Communicator> connect_tcp(const ConnectOptions& options);
// Joins ranks of another transport by connections for their roll calls alone. Throws CommError and
// PortFailure.
std::shared_ptr<VerdictPlace> connect_lines(const ConnectOptions& options);
// Throws Error(kUnsupported): the ranks are the application's to start.
std::vector<std::string> tcp_launch(int32_t ranks);

}  // namespace conclave::inline v0::comm
