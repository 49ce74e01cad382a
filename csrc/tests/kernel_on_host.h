// What a kernel needs to compile as plain C++ and run on the host, one thread after the other.
// Included by cuda/launch.h where no CUDA compiler is at work. Kernels whose threads talk to each
// other (shared memory, barriers, shuffles) do not compile here.
#pragma once

#include <cuda_runtime.h>
#include <math.h>  // nvcc brings it along: without it, host builds would hide a missing include

#include <cstddef>
#include <cstdint>
#include <functional>
#include <tuple>
#include <utility>

#undef __launch_bounds__
#define __launch_bounds__(...)
// CUDA's headers make it nothing on the host, and each thread would get its own.
#undef __shared__
#define __shared__ kernels_on_the_host_have_no_shared_memory

#define threadIdx (::hscache::cuda::host::running.thread)
#define blockIdx (::hscache::cuda::host::running.block)
#define blockDim (::hscache::cuda::host::running.block_size)
#define gridDim (::hscache::cuda::host::running.grid_size)

namespace hscache::cuda::host {

struct Running {
  uint3 thread;
  uint3 block;
  dim3 block_size;
  dim3 grid_size;
};
extern Running running;

// A kernel with its arguments, as they were when it was launched; runs one thread.
using Bound = std::function<void()>;
// Makes one of the arguments that the pointers point to.
using Binder = Bound (*)(const void* kernel, void** arguments);

void register_kernel(const void* kernel, Binder binder);

template <class... Parameters>
void register_kernel(void (*kernel)(Parameters...)) {
  register_kernel(reinterpret_cast<const void*>(kernel), [](const void* self, void** arguments) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) -> Bound {
      return [call = reinterpret_cast<void (*)(Parameters...)>(const_cast<void*>(self)),
              values = std::tuple<Parameters...>(*static_cast<Parameters*>(arguments[I])...)] {
        std::apply(call, values);
      };
    }(std::index_sequence_for<Parameters...>{});
  });
}

// Null for a kernel that was never registered.
Bound bind_arguments(const void* kernel, void** arguments);
// Runs the threads of one block, one after the other.
void run_block(const Bound& kernel, unsigned index, dim3 grid, dim3 block, bool backwards);

}  // namespace hscache::cuda::host
