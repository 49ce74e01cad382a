// The CPU backend: every stream is a thread, device memory is host memory.
#pragma once

#include <functional>

#include "core/device_runtime.h"

namespace hscache {

class HostRuntime final : public DeviceRuntime {
 public:
  bool reaches_host() const override { return true; }
  bool kernels_reach(const std::byte*) const override { return true; }
  bool wake_when_done(const std::function<void()>& wake) override {
    wake_ = wake;
    return true;
  }
  std::unique_ptr<Stream> create_stream() override;
  std::unique_ptr<Buffer> allocate_device(std::int64_t bytes) override;
  std::unique_ptr<Buffer> allocate_pinned(std::int64_t bytes) override;
  // Host memory needs no registration: all of it is taken.
  std::unique_ptr<Registration> register_host(std::byte* data, std::int64_t bytes) override;
  // Whoever writes rows in host memory has written them by the time of the call: the event is
  // done. Throws std::invalid_argument for a stream other than 0.
  std::shared_ptr<Event> record_on(std::uintptr_t stream) override;

 private:
  std::function<void()> wake_ = [] {};
};

}  // namespace hscache
