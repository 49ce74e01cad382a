#include "core/ticket.h"

#include <unistd.h>

#include <utility>

namespace hscache {
namespace {

// Longer waits have no limit: clocks cannot count to their end.
constexpr std::chrono::duration<double> kLongestWait{1e9};

}  // namespace

Ticket::Ticket() : owner_pid_(getpid()) {}

bool Ticket::in_child() const { return getpid() != owner_pid_; }

Ticket::State Ticket::state() const {
  // Without the lock: it may be held by a thread that was not forked along.
  if (in_child()) return state_ == State::kDone ? State::kDone : State::kFailed;
  const std::lock_guard lock(mutex_);
  return state_;
}

std::string Ticket::error() const {
  if (in_child()) return state_ == State::kDone ? "" : kForked;
  const std::lock_guard lock(mutex_);
  return error_;
}

std::int64_t Ticket::non_finite_rows() const {
  if (in_child()) return state_ == State::kDone ? non_finite_rows_ : 0;
  const std::lock_guard lock(mutex_);
  return non_finite_rows_;
}

bool Ticket::wait(std::optional<std::chrono::duration<double>> timeout) const {
  if (in_child()) return true;
  std::unique_lock lock(mutex_);
  const auto ended = [this] { return state_ != State::kPending; };
  if (timeout && *timeout < kLongestWait) return changed_.wait_for(lock, *timeout, ended);
  changed_.wait(lock, ended);
  return true;
}

void Ticket::end(std::string error, std::int64_t non_finite_rows) {
  {
    const std::lock_guard lock(mutex_);
    state_ = error.empty() ? State::kDone : State::kFailed;
    error_ = std::move(error);
    non_finite_rows_ = non_finite_rows;
  }
  changed_.notify_all();
}

void Ticket::cancel() {
  if (in_child()) return;
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
}

bool Ticket::cancelled() const {
  const std::lock_guard lock(mutex_);
  return cancelled_;
}

}  // namespace hscache
