// DeviceRuntime on CUDA streams.
#pragma once

#include <memory>
#include <string>

#include "core/device_runtime.h"

namespace hscache::cuda {

class EventPool;
class HostPieces;

// Streams of their own at the lowest priority, so that compute goes first, beside what the process
// runs. Thread-safe; the device of the calling thread is left as it was.
class CudaRuntime final : public DeviceRuntime {
 public:
  // Throws DeviceError where there is no such device, or no driver.
  explicit CudaRuntime(int device);
  ~CudaRuntime() override;

  // A kernel may write to registered host memory, but copies over the bus are faster packed.
  bool reaches_host() const override { return false; }
  // Makes the device the thread's own for good: going back, after each call, to the one that a
  // thread begins with would make a context on device 0.
  void enter_thread() override;
  bool kernels_reach(const std::byte* data) const override;
  std::unique_ptr<Stream> create_stream() override;
  std::unique_ptr<Buffer> allocate_device(std::int64_t bytes) override;
  std::unique_ptr<Buffer> allocate_pinned(std::int64_t bytes) override;
  // In pieces of 1 GiB: one call for all would hold the driver's lock, and so every CUDA process
  // of the host, for as long as it takes to pin everything, and fails as a whole. Copies are cut
  // where pieces meet.
  std::unique_ptr<Registration> register_host(std::byte* data, std::int64_t bytes) override;
  // Throws std::invalid_argument for a stream that is being captured into a graph.
  std::shared_ptr<Event> record_on(std::uintptr_t stream) override;

  // Bounds the grids of kernels, so that tests see their loops repeat; 0 for as large as pays.
  void set_max_grid(unsigned blocks) { max_grid_ = blocks; }
  // Of a registration, in whole pages.
  void set_piece_bytes(std::int64_t bytes) { piece_bytes_ = bytes; }

 private:
  const int device_;
  unsigned max_grid_ = 0;
  std::int64_t piece_bytes_ = std::int64_t{1} << 30;
  const std::shared_ptr<EventPool> events_;
  const std::shared_ptr<HostPieces> pieces_;
};

// What the device answers when asked for its number, for people; empty where there is one.
std::string why_no_device();

}  // namespace hscache::cuda
