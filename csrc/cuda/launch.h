// One launch for device and host: kernels compile as plain C++ too, so that tests run them thread
// by thread on a machine without a GPU.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <type_traits>

#if !defined(__CUDACC__)
#include "tests/kernel_on_host.h"
#endif

namespace hscache::cuda {

namespace detail {

template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                   Parameters... arguments) {
  static_assert((std::is_trivially_copyable_v<Parameters> && ...));
  std::array<void*, sizeof...(Parameters)> pointers{static_cast<void*>(&arguments)...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, pointers.data(), 0,
                          stream);
}

}  // namespace detail

// Launches `kernel` with arguments of exactly its parameter types. On the host its threads run one
// after the other.
template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                   std::type_identity_t<Parameters>... arguments) {
#if !defined(__CUDACC__)
  host::register_kernel(kernel, false);  // what the CUDA compiler does by itself
#endif
  return detail::launch(kernel, grid, block, stream, arguments...);
}

// The same for a kernel whose threads talk to each other by shuffles, votes or barriers: on the
// host each of them gets a stack of its own. On the device there is no difference.
template <class... Parameters>
cudaError_t launch_collective(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                              cudaStream_t stream, std::type_identity_t<Parameters>... arguments) {
#if !defined(__CUDACC__)
  host::register_kernel(kernel, true);
#endif
  return detail::launch(kernel, grid, block, stream, arguments...);
}

}  // namespace hscache::cuda
