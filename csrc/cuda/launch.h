// One launch for device and host: kernels compile as plain C++ too, so that tests run them thread
// by thread on a machine without a GPU.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <tuple>
#include <type_traits>

#if !defined(__CUDACC__)
#include "tests/kernel_on_host.h"
#endif

namespace hscache::cuda {

// Launches `kernel` with arguments of exactly its parameter types.
template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                   std::type_identity_t<Parameters>... arguments) {
  static_assert((std::is_trivially_copyable_v<Parameters> && ...));
#if !defined(__CUDACC__)
  host::register_kernel(kernel);  // what the CUDA compiler does by itself
#endif
  std::tuple<Parameters...> values(arguments...);
  return std::apply(
      [&](auto&... value) {
        std::array<void*, sizeof...(Parameters)> pointers{static_cast<void*>(&value)...};
        return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, pointers.data(),
                                0, stream);
      },
      values);
}

}  // namespace hscache::cuda
