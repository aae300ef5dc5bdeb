#include "conclave/comm.h"

namespace conclave::inline v0 {

void Communicator::all_to_all_v(const AllToAllV& exchange, std::string_view phase) {
  wait(begin_all_to_all_v(exchange), timeout(), phase);
}

void Communicator::all_gather(std::span<const std::byte> send, std::span<std::byte> recv,
                              std::string_view phase) {
  wait(begin_all_gather(send, recv), timeout(), phase);
}

void Communicator::all_reduce(std::span<const std::byte> send, std::span<std::byte> recv,
                              DType dtype, ReduceOp op, std::string_view phase) {
  wait(begin_all_reduce(send, recv, dtype, op), timeout(), phase);
}

void Communicator::reduce_scatter(std::span<const std::byte> send, std::span<std::byte> recv,
                                  DType dtype, ReduceOp op, std::string_view phase) {
  wait(begin_reduce_scatter(send, recv, dtype, op), timeout(), phase);
}

void Communicator::send(int32_t peer, std::span<const std::byte> data, std::string_view phase) {
  wait(begin_send(peer, data), timeout(), phase);
}

void Communicator::recv(int32_t peer, std::span<std::byte> data, std::string_view phase) {
  wait(begin_recv(peer, data), timeout(), phase);
}

void Communicator::barrier(std::string_view phase) { wait(begin_barrier(), timeout(), phase); }

}  // namespace conclave::inline v0
