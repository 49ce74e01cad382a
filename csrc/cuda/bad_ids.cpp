#include "cuda/bad_ids.h"

#include <atomic>
#include <map>
#include <mutex>

#include "cuda/beside_captures.h"

namespace hscache::cuda {
namespace {

struct Words {
  std::mutex mutex;
  std::map<int, volatile std::int64_t*> of_device;
};

// Never destroyed: see bad_id_words().
Words& all_words() {
  static auto* const words = new Words;
  return *words;
}

}  // namespace

cudaError_t bad_id_words(volatile std::int64_t** words) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  Words& all = all_words();
  const std::lock_guard lock(all.mutex);
  const auto known = all.of_device.find(device);
  if (known != all.of_device.end()) {
    *words = known->second;
    return cudaSuccess;
  }
  void* memory = nullptr;
  const BesideCaptures beside_captures;
  const cudaError_t error =
      cudaHostAlloc(&memory, 2 * sizeof(std::int64_t), cudaHostAllocMapped | cudaHostAllocPortable);
  if (error != cudaSuccess) return error;
  auto* const made = static_cast<volatile std::int64_t*>(memory);
  made[0] = 0;
  made[1] = 0;
  all.of_device[device] = made;
  *words = made;
  return cudaSuccess;
}

cudaError_t take_bad_id(cudaStream_t stream, std::optional<BadId>* found) {
  found->reset();
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(stream, &capture);
  if (error != cudaSuccess || capture != cudaStreamCaptureStatusNone) return error;
  volatile std::int64_t* words = nullptr;
  error = bad_id_words(&words);
  if (error != cudaSuccess) return error;
  const std::lock_guard lock(all_words().mutex);
  const std::int64_t id = words[0];
  if (id == 0) return cudaSuccess;
  std::atomic_thread_fence(std::memory_order_acquire);  // the kernel wrote the other word before
  *found = BadId{id, words[1]};
  words[0] = 0;
  return cudaSuccess;
}

}  // namespace hscache::cuda
