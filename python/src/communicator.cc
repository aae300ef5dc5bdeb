#include "communicator.h"

#include "arrays.h"

#include "conclave/error.h"

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave::python {
namespace {

using Seconds = std::chrono::duration<double>;

std::chrono::nanoseconds timeout_of(double seconds, const char* field = "timeout") {
  constexpr double kMost = 1e9;  // beyond the life of any job, and far below the type's limit
  if (!(seconds > 0 && seconds <= kMost)) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "a deadline is a number of seconds",
                                              .tensor = field,
                                              .expected = "above 0, at most 1e9",
                                              .found = std::to_string(seconds)});
  }
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(seconds));
}

// Leaving a group may wait for what is still on its way: other threads run meanwhile.
std::shared_ptr<Communicator> shared(std::unique_ptr<Communicator> communicator) {
  return {communicator.release(), [](Communicator* last) {
            const nb::gil_scoped_release released;
            delete last;
          }};
}

std::shared_ptr<Communicator> connect_rank(const std::string& transport, int32_t rank, int32_t size,
                                           const std::string& meeting_point, int32_t group,
                                           double timeout, const std::string& device,
                                           Communicator* bootstrap, const nb::object& exchange) {
  ConnectOptions options{.rank = rank,
                         .size = size,
                         .meeting_point = meeting_point,
                         .bootstrap = bootstrap,
                         .group = group,
                         .device = device,
                         .timeout = timeout_of(timeout)};
  if (!exchange.is_none()) {
    options.exchange = [&exchange](const std::string& mine) {
      const nb::gil_scoped_acquire held;
      return nb::cast<std::vector<std::string>>(exchange(mine));
    };
  }
  std::unique_ptr<Communicator> communicator;
  {
    const nb::gil_scoped_release released;
    communicator = connect(transport, options);
  }
  return shared(std::move(communicator));
}

nb::typed<nb::tuple, Communicator, std::vector<int32_t>> survivors_of(Communicator& failed,
                                                                      double deadline) {
  Survivors left;
  {
    const nb::gil_scoped_release released;
    left = survivors(failed, {.deadline = deadline == 0 ? std::chrono::nanoseconds(0)
                                                        : timeout_of(deadline, "deadline")});
  }
  std::shared_ptr<Communicator> communicator = shared(std::move(left.communicator));
  return nb::typed<nb::tuple, Communicator, std::vector<int32_t>>(
      nb::make_tuple(std::move(communicator), std::move(left.old_ranks)));
}

std::vector<std::shared_ptr<Communicator>> local_ranks(int32_t num_ranks, double timeout) {
  std::vector<std::shared_ptr<Communicator>> ranks;
  for (auto& rank : make_local_group({.num_ranks = num_ranks, .timeout = timeout_of(timeout)})) {
    ranks.push_back(shared(std::move(rank)));
  }
  return ranks;
}

template <class T>
T value_of(nb::handle given, const char* name, const char* expected) {
  T value;
  if (nb::try_cast<T>(given, value)) return value;
  throw Error(ErrorCode::kDType, {.what = "an argument has the wrong type",
                                  .tensor = name,
                                  .expected = expected,
                                  .found = nb::cast<std::string>(nb::str(given.type()))});
}
std::vector<int64_t> counts_of(nb::handle given, const char* name) {
  return value_of<std::vector<int64_t>>(given, name, "a list of integers, one for each rank");
}
std::string text_of(nb::handle given, const char* name) {
  return value_of<std::string>(given, name, "a text");
}

// Vectors that an operation reads and writes.
class Buffers {
 public:
  Buffers(nb::handle from, nb::handle to) : send_(from, "send"), recv_(to, "recv") {
    send_.require_device({});
    recv_.require_device({});
    in_ = {static_cast<const std::byte*>(send_.vector("[n]").data), bytes_of(send_)};
    out_ = {static_cast<std::byte*>(recv_.writable_vector("[n]").data), bytes_of(recv_)};
    if (send_.dtype() == recv_.dtype()) return;
    throw Error(ErrorCode::kDType, {.what = "an operation has one type",
                                    .tensor = "recv",
                                    .expected = std::string(dtype_to_python(send_.dtype())),
                                    .found = std::string(dtype_to_python(recv_.dtype()))});
  }

  std::span<const std::byte> in() const { return in_; }
  std::span<std::byte> out() const { return out_; }
  DType dtype() const { return send_.dtype(); }
  int64_t element_bytes() const { return byte_size(send_.dtype()); }

 private:
  static size_t bytes_of(const Array& array) {
    const int64_t elements = array.shape().empty() ? 1 : array.shape().front();
    return static_cast<size_t>(elements * byte_size(array.dtype()));
  }

  Array send_, recv_;
  std::span<const std::byte> in_;
  std::span<std::byte> out_;
};

// Blocks of the ranks in a vector, one behind the other.
struct Blocks {
  std::vector<int64_t> bytes, offsets;

  Blocks(const std::vector<int64_t>& counts, int64_t step, size_t room, const char* name) {
    const int64_t most = static_cast<int64_t>(room) / step;
    int64_t end = 0;
    for (const int64_t count : counts) {
      if (count < 0 || count > most - end) {
        throw Error(ErrorCode::kShape, {.what = "blocks of ranks do not fit the vector",
                                        .tensor = name,
                                        .expected = std::to_string(most) + " elements in all",
                                        .found = text_of(counts)});
      }
      bytes.push_back(count * step);
      offsets.push_back(end * step);
      end += count;
    }
  }

 private:
  static std::string text_of(const std::vector<int64_t>& counts) {
    std::string text;
    for (const int64_t count : counts) text += (text.empty() ? "" : " + ") + std::to_string(count);
    return text;
  }
};

AllToAllV exchange_of(const Buffers& buffers, const Blocks& sent, const Blocks& received) {
  return {.send = buffers.in().data(),
          .send_bytes = sent.bytes,
          .send_offsets = sent.offsets,
          .recv = buffers.out().data(),
          .recv_bytes = received.bytes,
          .recv_offsets = received.offsets};
}

void exchange_blocks(Communicator& self, const Buffers& buffers, const Blocks& sent,
                     const Blocks& received, const std::string& phase) {
  const nb::gil_scoped_release released;
  self.all_to_all_v(exchange_of(buffers, sent, received), phase);
}

// An exchange that goes on while its rank does other work. Its vectors are held until it has ended.
class Exchange {
 public:
  Exchange(Communicator& rank, Buffers buffers, Blocks sent, Blocks received, std::string phase)
      : rank_(rank),
        buffers_(std::move(buffers)),
        sent_(std::move(sent)),
        received_(std::move(received)),
        phase_(std::move(phase)) {
    const nb::gil_scoped_release released;
    handle_ = rank_.begin({.kind = CommKind::kAllToAllV,
                           .exchange = exchange_of(buffers_, sent_, received_),
                           .in_background = true});
  }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  // Its vectors go now, so that peers must not touch them any more: nobody can use this group on.
  ~Exchange() {
    if (state_ != State::kUnderWay) return;
    const nb::gil_scoped_release released;
    rank_.abort("an exchange was given up before it was waited for");
    try {
      rank_.wait(handle_, rank_.timeout(), phase_);
    } catch (const std::exception&) {
      return;  // as it must: it is over
    }
  }

  void wait() {
    if (state_ == State::kDone) return;
    if (state_ == State::kFailed) {
      rank_.check(phase_);
      throw Error(ErrorCode::kState, "this exchange has failed before");
    }
    state_ = State::kFailed;
    const nb::gil_scoped_release released;
    rank_.wait(handle_, rank_.timeout(), phase_);
    state_ = State::kDone;
  }
  bool is_complete() {
    if (state_ != State::kUnderWay) return state_ == State::kDone;
    const nb::gil_scoped_release released;
    return rank_.test(handle_, phase_);
  }

 private:
  enum class State : uint8_t { kUnderWay, kDone, kFailed };

  Communicator& rank_;  // the object that has begun this keeps it alive
  Buffers buffers_;
  Blocks sent_, received_;
  std::string phase_;
  CommHandle handle_;
  State state_ = State::kUnderWay;
};

std::unique_ptr<Exchange> begin_all_to_all(Communicator& self, nb::handle send,
                                           nb::handle send_counts, nb::handle recv,
                                           nb::handle recv_counts, nb::handle phase) {
  Buffers buffers(send, recv);
  const int64_t step = buffers.element_bytes();
  Blocks sent(counts_of(send_counts, "send_counts"), step, buffers.in().size(), "send_counts");
  Blocks received(counts_of(recv_counts, "recv_counts"), step, buffers.out().size(), "recv_counts");
  return std::make_unique<Exchange>(self, std::move(buffers), std::move(sent), std::move(received),
                                    text_of(phase, "phase"));
}

void all_gather(Communicator& self, nb::handle send, nb::handle recv, nb::handle counts,
                nb::handle phase) {
  const Buffers buffers(send, recv);
  const std::string step = text_of(phase, "phase");
  if (counts.is_none()) {
    const nb::gil_scoped_release released;
    return self.all_gather(buffers.in(), buffers.out(), step);
  }
  const Blocks received(counts_of(counts, "counts"), buffers.element_bytes(), buffers.out().size(),
                        "counts");
  Blocks sent({}, 1, 0, "counts");
  sent.bytes.assign(static_cast<size_t>(self.size()), static_cast<int64_t>(buffers.in().size()));
  sent.offsets.assign(static_cast<size_t>(self.size()), 0);
  exchange_blocks(self, buffers, sent, received, step);
}

void all_reduce(Communicator& self, nb::handle send, nb::handle recv, nb::handle phase) {
  const Buffers buffers(send, recv);
  const std::string step = text_of(phase, "phase");
  const nb::gil_scoped_release released;
  self.all_reduce(buffers.in(), buffers.out(), buffers.dtype(), ReduceOp::kSum, step);
}

void all_to_all(Communicator& self, nb::handle send, nb::handle send_counts, nb::handle recv,
                nb::handle recv_counts, nb::handle phase) {
  const Buffers buffers(send, recv);
  const int64_t step = buffers.element_bytes();
  const Blocks sent(counts_of(send_counts, "send_counts"), step, buffers.in().size(),
                    "send_counts");
  const Blocks received(counts_of(recv_counts, "recv_counts"), step, buffers.out().size(),
                        "recv_counts");
  exchange_blocks(self, buffers, sent, received, text_of(phase, "phase"));
}

void abort_for(Communicator& self, nb::handle reason) {
  const std::string text = text_of(reason, "reason");
  const nb::gil_scoped_release released;
  self.abort(text);
}

bool is_usable(Communicator& self) {
  try {
    self.check("check");
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

void bind_communicator(nb::module_& module) {
  nb::class_<Exchange>(module, "Exchange",
                       "What begin_all_to_all has begun. One that is dropped before its wait has "
                       "returned ends the group: every later operation of it fails.")
      .def("wait", &Exchange::wait, "Returns when it is complete, at most after the timeout.")
      .def_prop_ro("is_complete", &Exchange::is_complete,
                   "Whether wait would return at once. Waits for nobody.");
  nb::class_<Communicator>(module, "Communicator",
                           "One rank of a group of processes or threads. Layers keep it alive.")
      .def_prop_ro("name", [](const Communicator& self) { return std::string(self.name()); })
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def_prop_ro("timeout",
                   [](const Communicator& self) { return Seconds(self.timeout()).count(); })
      .def(
          "barrier", [](Communicator& self) { self.barrier("barrier"); },
          nb::call_guard<nb::gil_scoped_release>(),
          "Waits until every rank calls it, at most for the timeout.")
      .def("all_gather", &all_gather, nb::arg("send").none(), nb::arg("recv").none(),
           nb::arg("counts").none() = nb::none(), nb::arg("phase").none() = "all_gather",
           "Every rank's vector, on the CPU, one behind the other in rank order. send [n], recv "
           "[ranks n]; with counts, the length of each rank's vector, recv [sum of counts].")
      .def("all_reduce", &all_reduce, nb::arg("send").none(), nb::arg("recv").none(),
           nb::arg("phase").none() = "all_reduce",
           "The sum of every rank's vector, in rank order. send and recv [n], apart, of float32, "
           "float64, int32 or int64, on the CPU.")
      .def("all_to_all", &all_to_all, nb::arg("send").none(), nb::arg("send_counts").none(),
           nb::arg("recv").none(), nb::arg("recv_counts").none(),
           nb::arg("phase").none() = "all_to_all",
           "A block to each rank and one from it, in rank order; counts are numbers of elements.")
      .def("begin_all_to_all", &begin_all_to_all, nb::arg("send").none(),
           nb::arg("send_counts").none(), nb::arg("recv").none(), nb::arg("recv_counts").none(),
           nb::arg("phase").none() = "all_to_all", nb::keep_alive<0, 1>(),
           "The same without waiting: the exchange goes on while this rank does other work, where "
           "the transport can. send stays as it is, and recv is not read, until the result's wait "
           "has returned.")
      .def_prop_ro(
          "is_usable",
          [](Communicator& self) {
            const nb::gil_scoped_release released;
            return is_usable(self);
          },
          "False once an operation has failed: the group is to be connected anew.")
      .def("abort", &abort_for, nb::arg("reason").none(),
           "Makes every present and later wait of every rank fail. From any thread.");
  module.def("connect", &connect_rank, nb::arg("transport"), nb::arg("rank"), nb::arg("size"),
             nb::arg("meeting_point"), nb::arg("group"), nb::arg("timeout"), nb::arg("device") = "",
             nb::arg("bootstrap").none() = nb::none(), nb::arg("exchange") = nb::none(),
             "Joins this process to a group of ranks.");
  module.def("survivors", &survivors_of, nb::arg("failed"), nb::arg("deadline"),
             "The communicator of the ranks that are left, and who they were.");
  module.def("local_group", &local_ranks, nb::arg("num_ranks"), nb::arg("timeout"),
             "The ranks of a group of threads of this process.");
  module.def(
      "launch_command",
      [](const std::string& transport, int32_t ranks) { return launch_command(transport, ranks); },
      nb::arg("transport"), nb::arg("ranks"), "The words that start ranks on this machine.");
  module.def(
      "transports",
      [] {
        nb::list rows;
        for (const TransportInfo& row : transports()) {
          rows.append(nb::make_tuple(row.name, row.usable, row.reason, row.meets_by_exchange,
                                     row.device_kind));
        }
        return rows;
      },
      "Each transport's name, whether it is usable, why not or what its ranks are, whether its "
      "ranks meet by texts, and the kind of the device whose memory it carries.");
}

}  // namespace conclave::python
