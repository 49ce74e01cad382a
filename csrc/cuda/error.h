// CUDA's refusals as exceptions.
#pragma once

#include <cuda_runtime_api.h>

namespace hscache::cuda {

// Whether nothing runs in this process's context any more after such an error.
bool loses_context(cudaError_t error);

// Throws DeviceError in CUDA's own words, and takes the error out of CUDA's state, so that no
// later call of somebody else reports it. Nothing for cudaSuccess.
void check(cudaError_t error, const char* doing);

}  // namespace hscache::cuda
