// The few calls of CUDA that the operators make, beside launches: for _ops_on_host, where device
// memory is host memory.
#include <cuda_runtime_api.h>

#include <cstdlib>

namespace {
bool capturing = false;
}

extern "C" {

// For the Python tests: whether the current stream is being captured into a graph.
__attribute__((visibility("default"))) void hscache_on_host_capture(int on) { capturing = on != 0; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  *data = std::malloc(bytes);
  return *data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "an error"; }
const char* cudaGetErrorString(cudaError_t) { return "of the stand-in"; }

}  // extern "C"
