#include "tests/kernel_on_host.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#include <map>
#include <vector>

#include "tests/layouts.h"

namespace hscache::cuda::host {

Running running;

namespace {

constexpr unsigned kMostThreads = 1024;

test::Random order(0);
Launch latest;

std::map<const void*, Thunk>& kernels() {
  static std::map<const void*, Thunk> all;
  return all;
}

}  // namespace

void register_kernel(const void* kernel, Thunk thunk) { kernels()[kernel] = thunk; }
void set_order(std::uint64_t seed) { order = test::Random(seed); }
Launch latest_launch() { return latest; }

}  // namespace hscache::cuda::host

// In place of the runtime's own. Runs the kernel at once, blocks in random order, the threads of
// some of them backwards.
extern "C" cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                                        std::size_t shared_bytes, cudaStream_t stream) {
  using namespace hscache::cuda::host;
  const auto found = kernels().find(kernel);
  if (found == kernels().end()) return cudaErrorInvalidDeviceFunction;
  if (grid.x < 1 || grid.y != 1 || grid.z != 1 || block.x < 1 || block.x > kMostThreads ||
      block.y != 1 || block.z != 1 || shared_bytes != 0) {
    return cudaErrorInvalidConfiguration;
  }
  latest = {latest.number + 1, kernel, grid.x, stream};
  std::vector<unsigned> blocks;
  for (unsigned i = 0; i < grid.x; ++i) blocks.push_back(i);
  order.shuffle(blocks);
  for (const unsigned index : blocks) {
    const bool backwards = order.chance(50);
    for (unsigned i = 0; i < block.x; ++i) {
      running = {{backwards ? block.x - 1 - i : i, 0, 0}, {index, 0, 0}, block, grid};
      found->second(kernel, arguments);
    }
  }
  return cudaSuccess;
}
