// A launch that runs the kernel at once: for tests of kernels alone.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace hscache::cuda::host {

// The order of blocks and threads in the launches that follow.
void set_order(std::uint64_t seed);

// The latest launch.
struct Launch {
  std::int64_t number = 0;  // from 1
  const void* kernel = nullptr;
  unsigned blocks = 0;
  cudaStream_t stream = nullptr;
};
Launch latest_launch();

}  // namespace hscache::cuda::host
