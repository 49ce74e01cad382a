// The CPU backend: every stream is a thread, device memory is host memory.
#pragma once

#include "core/device_runtime.h"

namespace hscache {

class HostRuntime final : public DeviceRuntime {
 public:
  std::unique_ptr<Stream> create_stream() override;
  // Host producers have written their rows by the time they call: the event is done. Throws
  // std::invalid_argument for a stream other than 0.
  std::shared_ptr<Event> record_producer(std::uintptr_t stream) override;
};

}  // namespace hscache
