// A function on a stack of its own, which stops in the middle and goes on later.
//
// Sanitizers are told of every switch. For ThreadSanitizer a fiber may count as a thread: what it
// does is then ordered with others only by what the code says, although one thread runs it all.
#pragma once

#include <cstddef>

namespace hscache::test {

class Fiber {
 public:
  enum class Counts { kAsItsCaller, kAsAThread };

  // The thread of the sanitizer begins here, with all that its maker has seen until now.
  explicit Fiber(Counts counts);
  // What has not ended never goes on.
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes it ready to run from its beginning. The function must not throw.
  void start(void (*run)(void*), void* context);
  // Runs it until it stops or ends.
  void resume();
  // Called by what it runs: back to whoever resumed it.
  void stop();
  bool ended() const { return ended_; }

 private:
  static void enter();
  void leave(bool for_good);

  std::byte* stack_ = nullptr;
  void* own_ = nullptr;  // stack pointers, while the other one runs
  void* caller_ = nullptr;
  void (*run_)(void*) = nullptr;
  void* context_ = nullptr;
  bool ended_ = true;
  void* thread_ = nullptr;  // ThreadSanitizer's; null where it counts as its caller
  void* caller_thread_ = nullptr;
  void* seen_by_ = nullptr;     // the sanitizer's thread that last used the stack
  void* fake_stack_ = nullptr;  // AddressSanitizer's
  const void* caller_stack_ = nullptr;
  std::size_t caller_stack_bytes_ = 0;
};

}  // namespace hscache::test
