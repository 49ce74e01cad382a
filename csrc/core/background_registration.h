// Registers memory piece by piece while it is in use already.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "core/device_runtime.h"

namespace hscache {

// A thread that extends a registration until there is no more to take, and then ends. Thread-safe.
class BackgroundRegistration {
 public:
  explicit BackgroundRegistration(std::unique_ptr<Registration> registration);
  // Ends the registration, after the piece in hand. In a forked child it leaks on purpose: the
  // thread is not there, and the device is the parent's.
  ~BackgroundRegistration();
  BackgroundRegistration(const BackgroundRegistration&) = delete;
  BackgroundRegistration& operator=(const BackgroundRegistration&) = delete;

  std::int64_t bytes() const;
  std::string refusal() const;
  bool at_work() const;
  // Until the thread has ended.
  void wait() const;
  // Takes no more than the piece in hand, and waits for that. What was taken stays.
  void stop();

 private:
  struct Work;

  const int owner_pid_;
  std::unique_ptr<Work> work_;
};

}  // namespace hscache
