#include "host/host_runtime.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "core/host_copy.h"

namespace hscache {
namespace {

class HostEvent final : public Event {
 public:
  bool done() const override {
    const std::lock_guard lock(mutex_);
    return done_;
  }

  void complete() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    changed_.notify_all();
  }

  void wait() const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool done_ = false;
};

class HostStream final : public Stream {
 public:
  HostStream() : thread_([this] { run(); }) {}

  ~HostStream() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  void wait(std::shared_ptr<Event> event) override {
    enqueue([event = std::static_pointer_cast<HostEvent>(std::move(event))] { event->wait(); });
  }

  void copy(const PagedView& paged, const RowsView& rows, std::vector<CopySpan> plan) override {
    enqueue([paged, rows, plan = std::move(plan)] { copy_to_rows(paged, rows, plan); });
  }

  std::shared_ptr<Event> record() override {
    auto event = std::make_shared<HostEvent>();
    enqueue([event] { event->complete(); });
    return event;
  }

 private:
  void enqueue(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_one();
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool closing_ = false;
  std::thread thread_;  // last: it uses what stands above
};

}  // namespace

std::unique_ptr<Stream> HostRuntime::create_stream() { return std::make_unique<HostStream>(); }

std::shared_ptr<Event> HostRuntime::record_producer(std::uintptr_t stream) {
  if (stream != 0) {
    throw std::invalid_argument("producer stream is " + std::to_string(stream) +
                                ": rows in host memory have no stream, pass 0");
  }
  auto event = std::make_shared<HostEvent>();
  event->complete();
  return event;
}

}  // namespace hscache
