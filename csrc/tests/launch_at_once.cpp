#include "tests/launch_at_once.h"

#include <vector>

#include "tests/kernel_on_host.h"
#include "tests/layouts.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace hscache::cuda::host {
namespace {

constexpr unsigned kMostThreads = 1024;

test::Random order(0);
Launch latest;

}  // namespace

void set_order(std::uint64_t seed) { order = test::Random(seed); }
Launch latest_launch() { return latest; }

}  // namespace hscache::cuda::host

// In place of the runtime's own: blocks and their threads in random order.
extern "C" cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                                        std::size_t shared_bytes, cudaStream_t stream) {
  using namespace hscache::cuda::host;
  const Bound bound = bind_arguments(kernel, arguments);
  if (!bound.run_thread) return cudaErrorInvalidDeviceFunction;
  if (grid.x < 1 || grid.y != 1 || grid.z != 1 || block.x < 1 || block.x > kMostThreads ||
      block.y != 1 || block.z != 1 || shared_bytes != 0) {
    return cudaErrorInvalidConfiguration;
  }
  latest = {latest.number + 1, kernel, grid.x, stream};
  std::vector<unsigned> blocks;
  for (unsigned i = 0; i < grid.x; ++i) blocks.push_back(i);
  order.shuffle(blocks);
  for (const unsigned index : blocks) run_block(bound, index, grid, block, order.bits());
  return cudaSuccess;
}
