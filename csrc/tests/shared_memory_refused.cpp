// Must not compile: a kernel on the host has no memory that its threads share.
#include "cuda/launch.h"

__global__ void kernel(int* out) {
  __shared__ int sum;
  sum = threadIdx.x;
  *out = sum;
}
