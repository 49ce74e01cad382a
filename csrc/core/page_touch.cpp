#include "core/page_touch.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23
#endif

namespace hscache {
namespace {

constexpr std::int64_t kCallBytes = 2LL << 20;   // one huge page; how long a stop takes
constexpr std::int64_t kStepBytes = 16LL << 20;  // between two looks at the memory that is left
constexpr int kNiceness = 10;

// Threads started while it lives take no signals: those are for the program's own threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

int populate_pages(std::byte* data, std::int64_t bytes) {
  while (madvise(data, static_cast<std::size_t>(bytes), MADV_POPULATE_WRITE) != 0) {
    if (errno == EINVAL) return touch_each_page(data, bytes);
    if (errno != EINTR) return errno;
  }
  return 0;
}

int touch_each_page(std::byte* data, std::int64_t bytes) {
  // A compiler may turn the addition of a 0 that it knows into a mere load, which would not do.
  const volatile unsigned char zero = 0;
  const std::int64_t page = sysconf(_SC_PAGESIZE);
  for (std::int64_t offset = 0; offset < bytes; offset += page) {
    __atomic_fetch_add(reinterpret_cast<unsigned char*>(data + offset), zero, __ATOMIC_RELAXED);
  }
  return 0;
}

struct PageTouch::Work {
  std::byte* const data;
  const std::int64_t bytes;
  const PageTouchOptions options;
  const std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();
  std::atomic<std::int64_t> next{0};  // where the next step begins
  std::atomic<std::int64_t> touched{0};
  std::atomic<bool> stop{false};
  std::atomic<bool> limit_passed{false};
  std::atomic<int> running{0};
  mutable std::mutex mutex;
  std::string refusal;
  std::vector<std::thread> threads;

  void refuse(const std::string& why) {
    stop = true;
    const std::lock_guard lock(mutex);
    if (refusal.empty()) {
      refusal = "touching ended after " + std::to_string(touched) + " bytes: " + why;
    }
  }

  void run() {
    // On Linux this is the thread's own priority. What the kernel refuses costs nothing but time.
    static_cast<void>(setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kNiceness));
    while (!stop) {
      const std::int64_t begin = next.fetch_add(kStepBytes);
      if (begin >= bytes) break;
      touch_step(begin, std::min(begin + kStepBytes, bytes));
    }
    --running;
  }

  void touch_step(std::int64_t begin, std::int64_t end) {
    const std::int64_t left = options.available();
    if (left - options.keep_free_bytes < end - begin) {
      refuse(std::to_string(left) + " bytes of memory are left, and " +
             std::to_string(options.keep_free_bytes) + " are kept for others");
      return;
    }
    if (options.limit && std::chrono::steady_clock::now() - started >= *options.limit &&
        !limit_passed.exchange(true)) {
      options.at_limit(data + begin, bytes - begin);
    }
    for (; begin < end && !stop; begin += kCallBytes) {
      const std::int64_t size = std::min(kCallBytes, end - begin);
      if (const int error = options.touch(data + begin, size); error != 0) {
        refuse("the kernel says " + std::generic_category().message(error));
        return;
      }
      touched += size;
    }
  }
};

PageTouch::PageTouch(std::byte* data, std::int64_t bytes, PageTouchOptions options)
    : owner_pid_(getpid()), work_(std::make_unique<Work>(data, bytes, std::move(options))) {
  const SignalsBlocked blocked;
  try {
    for (int i = 0; i < work_->options.threads; ++i) {
      ++work_->running;
      work_->threads.emplace_back([work = work_.get()] { work->run(); });
      static_cast<void>(pthread_setname_np(work_->threads.back().native_handle(), "hscache-touch"));
    }
  } catch (const std::system_error& error) {
    // Those that did start go on. Without any the memory works as well, only slower at first.
    --work_->running;
    if (work_->threads.empty()) work_->refuse(std::string("no thread starts, ") + error.what());
  }
}

PageTouch::~PageTouch() {
  if (getpid() != owner_pid_) {
    static_cast<void>(work_.release());
    return;
  }
  work_->stop = true;
  for (std::thread& thread : work_->threads) thread.join();
}

std::int64_t PageTouch::touched_bytes() const { return work_->touched; }

bool PageTouch::at_work() const { return work_->running > 0; }

std::string PageTouch::refusal() const {
  const std::lock_guard lock(work_->mutex);
  return work_->refusal;
}

}  // namespace hscache
