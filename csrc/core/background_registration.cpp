#include "core/background_registration.h"

#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace hscache {

struct BackgroundRegistration::Work {
  explicit Work(std::unique_ptr<Registration> given)
      : registration(std::move(given)), thread([this] { run(); }) {}

  void run() {
    std::string why;
    try {
      while (!stopped() && registration->extend()) {
      }
    } catch (const std::exception& error) {
      why = error.what();
    }
    {
      const std::lock_guard lock(mutex);
      at_work = false;
      failure = std::move(why);
    }
    ended.notify_all();
  }

  bool stopped() const {
    const std::lock_guard lock(mutex);
    return stop;
  }

  const std::unique_ptr<Registration> registration;
  mutable std::mutex mutex;
  mutable std::condition_variable ended;
  bool at_work = true;
  bool stop = false;
  std::string failure;  // of a call, rather than a refusal
  std::thread thread;   // last: it uses what stands above
};

BackgroundRegistration::BackgroundRegistration(std::unique_ptr<Registration> registration)
    : owner_pid_(getpid()), work_(std::make_unique<Work>(std::move(registration))) {}

BackgroundRegistration::~BackgroundRegistration() {
  if (getpid() != owner_pid_) {
    static_cast<void>(work_.release());
    return;
  }
  stop();
  work_->thread.join();
}

void BackgroundRegistration::stop() {
  if (getpid() != owner_pid_) return;
  {
    const std::lock_guard lock(work_->mutex);
    work_->stop = true;
  }
  wait();
}

std::int64_t BackgroundRegistration::bytes() const { return work_->registration->bytes(); }

std::string BackgroundRegistration::refusal() const {
  std::string refusal = work_->registration->refusal();
  if (!refusal.empty() || getpid() != owner_pid_) return refusal;
  const std::lock_guard lock(work_->mutex);
  return work_->failure;
}

bool BackgroundRegistration::at_work() const {
  if (getpid() != owner_pid_) return false;
  const std::lock_guard lock(work_->mutex);
  return work_->at_work;
}

void BackgroundRegistration::wait() const {
  if (getpid() != owner_pid_) return;
  std::unique_lock lock(work_->mutex);
  work_->ended.wait(lock, [this] { return !work_->at_work; });
}

}  // namespace hscache
