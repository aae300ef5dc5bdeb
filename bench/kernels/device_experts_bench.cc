// Times rows of the GPU's kernel table alone, without router and sum;
// tests/support/cuda/experts_bench.h lists the options.
#include "experts/catalog.h"
#include "support/cuda/experts_bench.h"

int main(int argc, char** argv) {
  return conclave::testing::run_experts_bench(conclave::experts::device_kernels().rows(), argc,
                                              argv);
}
