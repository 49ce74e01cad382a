#include "tests/kernel_on_host.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#include <map>

namespace hscache::cuda::host {

Running running;

namespace {

std::map<const void*, Binder>& kernels() {
  static std::map<const void*, Binder> all;
  return all;
}

}  // namespace

void register_kernel(const void* kernel, Binder binder) { kernels()[kernel] = binder; }

Bound bind_arguments(const void* kernel, void** arguments) {
  const auto found = kernels().find(kernel);
  return found == kernels().end() ? nullptr : found->second(kernel, arguments);
}

void run_block(const Bound& kernel, unsigned index, dim3 grid, dim3 block, bool backwards) {
  for (unsigned i = 0; i < block.x; ++i) {
    running = {{backwards ? block.x - 1 - i : i, 0, 0}, {index, 0, 0}, block, grid};
    kernel();
  }
}

}  // namespace hscache::cuda::host
