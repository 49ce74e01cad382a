// Built without ThreadSanitizer's instrumentation, and without AddressSanitizer's: what happens
// between two stacks belongs to neither.
#include "tests/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

// There where the sanitizer is.
extern "C" {
__attribute__((weak)) void* __tsan_get_current_fiber(void);
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_destroy_fiber(void* fiber);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom,
                                                          std::size_t bytes);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom,
                                                           std::size_t* bytes);
}

namespace hscache::test {
namespace {

constexpr std::size_t kStackBytes = std::size_t{256} << 10;  // of which only touched pages cost
constexpr unsigned kNoSync = 1;                              // a switch orders nothing

thread_local Fiber* current = nullptr;

std::byte* map_stack(void* at) {
  void* const stack =
      mmap(at, kStackBytes, PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0), -1, 0);
  if (stack == MAP_FAILED) {
    std::fprintf(stderr, "no memory for a fiber's stack\n");
    std::abort();
  }
  return static_cast<std::byte*>(stack);
}

}  // namespace

#if defined(__x86_64__)
// Keeps what a function call must keep on the old stack, and goes on from the new one.
// swapcontext() would ask the kernel for the signal mask at every switch.
extern "C" void hscache_switch_stacks(void** from, void* to);
asm(R"(
  .text
  .globl hscache_switch_stacks
  .type hscache_switch_stacks, @function
hscache_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size hscache_switch_stacks, .-hscache_switch_stacks
)");

namespace {

void* prepare(std::byte* stack, void (*entry)()) {
  auto* top = reinterpret_cast<std::uintptr_t*>(stack + kStackBytes);
  *--top = 0;  // where a debugger's walk ends; the entry is aligned as if called from there
  *--top = reinterpret_cast<std::uintptr_t>(entry);
  for (int saved = 0; saved < 6; ++saved) *--top = 0;
  return top;
}
void switch_stacks(void** from, void* to) { hscache_switch_stacks(from, to); }

}  // namespace
#else
namespace {

// At the low end of the stack, which grows towards it from the other.
void* prepare(std::byte* stack, void (*entry)()) {
  auto* const context = reinterpret_cast<ucontext_t*>(stack);
  getcontext(context);
  context->uc_stack.ss_sp = context + 1;
  context->uc_stack.ss_size = kStackBytes - sizeof(ucontext_t);
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}
void switch_stacks(void** from, void* to) {
  ucontext_t here;
  *from = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}

}  // namespace
#endif

Fiber::Fiber(Counts counts) : stack_(map_stack(nullptr)) {
  if (counts == Counts::kAsAThread && __tsan_create_fiber) thread_ = __tsan_create_fiber(0);
}

Fiber::~Fiber() {
  if (thread_) __tsan_destroy_fiber(thread_);
  munmap(stack_, kStackBytes);
}

void Fiber::start(void (*run)(void*), void* context) {
  if (__tsan_get_current_fiber && !thread_) {
    // What another thread of the sanitizer's had on this stack is nothing to us.
    void* const here = __tsan_get_current_fiber();
    if (seen_by_ && seen_by_ != here) map_stack(stack_);
    seen_by_ = here;
  }
  run_ = run;
  context_ = context;
  ended_ = false;
  own_ = prepare(stack_, &Fiber::enter);
}

void Fiber::resume() {
  Fiber* const outer = current;
  current = this;
  void* fake_stack = nullptr;
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(&fake_stack, stack_, kStackBytes);
  }
  if (thread_) {
    caller_thread_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(thread_, kNoSync);
  }
  switch_stacks(&caller_, own_);
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
  }
  current = outer;
}

void Fiber::leave(bool for_good) {
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack_, caller_stack_,
                                   caller_stack_bytes_);
  }
  if (thread_) __tsan_switch_to_fiber(caller_thread_, kNoSync);
  switch_stacks(&own_, caller_);
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(fake_stack_, &caller_stack_, &caller_stack_bytes_);
  }
}

void Fiber::stop() { leave(false); }

void Fiber::enter() {
  Fiber& self = *current;
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(nullptr, &self.caller_stack_, &self.caller_stack_bytes_);
  }
  self.run_(self.context_);
  self.ended_ = true;
  self.leave(true);
  std::abort();
}

}  // namespace hscache::test
