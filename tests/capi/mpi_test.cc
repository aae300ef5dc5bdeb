// Layers of C over MPI: by an application's MPI_Comm, and by the launcher.
#include "capi/handles.h"
#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <mpi.h>

namespace conclave {
namespace {

using testing::make;
using testing::sized;

Tensor forward(const conclave_layer* layer, const Tensor& hidden) {
  Tensor out(DType::kF32, hidden.shape());
  const conclave_tensor in = testing::tensor_of(hidden.const_view());
  const conclave_tensor written = testing::tensor_of(out.const_view());
  auto args = sized<conclave_forward_args>();
  args.hidden = &in;
  args.out = &written;
  EXPECT_EQ(conclave_layer_forward(layer, &args), CONCLAVE_OK) << conclave_last_error_message();
  return out;
}

void expect_bits_of_one_rank(conclave_communicator* communicator) {
  auto info = sized<conclave_communicator_info>();
  ASSERT_EQ(conclave_communicator_get_info(communicator, &info), CONCLAVE_OK);
  EXPECT_STREQ(info.transport, "mpi");
  auto options = sized<conclave_context_options>();
  options.num_threads = 1;
  options.communicator = communicator;
  const auto context = make<conclave_context>(&conclave_context_create, &options);
  const auto checkpoint = testing::open_model();
  auto parallel = sized<conclave_parallel>();
  parallel.ep_size = info.size;
  parallel.ep_rank = info.rank;
  const auto layer = make<conclave_layer>(&conclave_layer_create_from_checkpoint, context.get(),
                                          checkpoint.get(), int64_t{0}, nullptr, &parallel);
  const auto one = testing::make_context();
  const auto whole = make<conclave_layer>(&conclave_layer_create_from_checkpoint, one.get(),
                                          checkpoint.get(), int64_t{0}, nullptr, nullptr);
  const Tensor hidden = testing::random_tensor(DType::kBF16, 3 + info.rank, 88, 5);
  EXPECT_TRUE(testing::same_bits(forward(layer.get(), hidden), forward(whole.get(), hidden)));
}

TEST(MpiC, RanksByTheLauncher) {
  auto options = sized<conclave_connect_options>();
  options.timeout_ms = 60000;
  const auto communicator = make<conclave_communicator>(&conclave_connect, "mpi", &options);
  expect_bits_of_one_rank(communicator.get());
}

TEST(MpiC, RanksOfAnApplicationsCommunicator) {
  // The launcher's ranks have initialised MPI.
  const MPI_Comm world = MPI_COMM_WORLD;
  const auto communicator = make<conclave_communicator>(
      &conclave_communicator_from_mpi, static_cast<const void*>(&world), int64_t{60000});
  expect_bits_of_one_rank(communicator.get());
}

}  // namespace
}  // namespace conclave
