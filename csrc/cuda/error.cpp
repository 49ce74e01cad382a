#include "cuda/error.h"

#include <string>

#include "core/device_runtime.h"

namespace hscache::cuda {
bool loses_context(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContextIsDestroyed:
      return true;
    default:
      return false;
  }
}

void check(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  // What is told here must not be told again by the next call of somebody else.
  static_cast<void>(cudaGetLastError());
  const bool lost = loses_context(error);
  throw DeviceError(std::string(cudaGetErrorName(error)) + " (" + cudaGetErrorString(error) +
                        ") while " + doing +
                        (lost ? ": the CUDA context is lost, restart the process" : ""),
                    lost);
}

}  // namespace hscache::cuda
