// Calls beside somebody else's capture of a graph.
#pragma once

#include <cuda_runtime_api.h>

namespace hscache::cuda {

// Lets the calling thread ask and allocate while it or another one captures a graph that has no
// part in it. By default such a call is refused, and ends the capture.
class BesideCaptures {
 public:
  BesideCaptures() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~BesideCaptures() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace hscache::cuda
