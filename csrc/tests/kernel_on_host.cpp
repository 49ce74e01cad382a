// Built without ThreadSanitizer's instrumentation: which thread of a block runs is nobody's memory
// but the device's own.
#include "tests/kernel_on_host.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>

#include "tests/fiber.h"
#include "tests/layouts.h"

namespace hscache::cuda::host {

Running running;

namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kMostThreads = 1024;

std::map<const void*, std::pair<Binder, bool>>& kernels() {
  static std::map<const void*, std::pair<Binder, bool>> all;
  return all;
}

// A thread of the block that runs.
struct Thread {
  std::unique_ptr<test::Fiber> fiber;
  uint3 index{};
  const std::function<void()>* run = nullptr;
  bool waits = false;
  Meeting meeting;
  std::uint64_t answer = 0;
};

// Made once: a stack for each thread, used again for every block.
std::array<Thread, kMostThreads> threads;
std::array<unsigned, kMostThreads> runnable;
unsigned num_threads = 0;
unsigned num_runnable = 0;
Thread* now = nullptr;  // the thread that runs; null where threads run one after the other

unsigned index_of(const Thread& thread) { return static_cast<unsigned>(&thread - threads.data()); }

void let_go(Thread& thread, std::uint64_t answer) {
  thread.waits = false;
  thread.answer = answer;
  runnable[num_runnable++] = index_of(thread);
}

// Lets a warp's lanes go on, if `last` was the last to come.
void try_warp(const Thread& last) {
  Thread* const warp = &threads[index_of(last) / kWarp * kWarp];
  const Meeting meeting = last.meeting;
  std::uint64_t votes = 0;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((meeting.mask >> lane & 1U) == 0) continue;
    const bool there = index_of(warp[lane]) < num_threads && warp[lane].waits &&
                       warp[lane].meeting.call == meeting.call &&
                       warp[lane].meeting.mask == meeting.mask;
    if (!there) return;
    votes |= warp[lane].meeting.value << lane;
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((meeting.mask >> lane & 1U) == 0) continue;
    std::uint64_t answer = votes;
    if (meeting.kind == Meeting::Kind::kShuffle) {
      answer = warp[warp[lane].meeting.source].meeting.value;
    }
    let_go(warp[lane], answer);
  }
}

// Lets the block go on, if all that have not ended wait for each other.
void try_block() {
  for (unsigned i = 0; i < num_threads; ++i) {
    const Thread& thread = threads[i];
    if (thread.fiber->ended()) continue;
    if (!thread.waits || thread.meeting.kind != Meeting::Kind::kBlockBarrier) return;
  }
  for (unsigned i = 0; i < num_threads; ++i) {
    if (!threads[i].fiber->ended()) let_go(threads[i], 0);
  }
}

[[noreturn]] void die_of_deadlock() {
  for (unsigned i = 0; i < num_threads; ++i) {
    const Thread& thread = threads[i];
    if (thread.fiber->ended()) continue;
    std::fprintf(stderr, "kernel on the host: deadlock in block %u: thread %u waits in %s",
                 running.block.x, i, thread.meeting.call);
    const Thread* const warp = &threads[i / kWarp * kWarp];
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      const Thread& other = warp[lane];
      if ((thread.meeting.mask >> lane & 1U) == 0 || &other == &thread) continue;
      const bool exists = index_of(other) < num_threads;
      if (exists && other.waits && other.meeting.call == thread.meeting.call &&
          other.meeting.mask == thread.meeting.mask) {
        continue;
      }
      std::fprintf(stderr, " for thread %u, which %s%s", index_of(other),
                   !exists                ? "does not exist"
                   : other.fiber->ended() ? "has ended"
                                          : "waits in ",
                   exists && !other.fiber->ended() ? other.meeting.call : "");
      break;
    }
    std::fprintf(stderr, "\n");
    break;
  }
  std::abort();
}

void run_together(const Bound& kernel, unsigned index, dim3 grid, dim3 block, std::uint64_t seed) {
  test::Random random(seed);
  num_threads = block.x;
  num_runnable = 0;
  for (unsigned i = 0; i < num_threads; ++i) {
    Thread& thread = threads[i];
    if (!thread.fiber) {
      thread.fiber = std::make_unique<test::Fiber>(test::Fiber::Counts::kAsItsCaller);
    }
    thread.index = {i, 0, 0};
    thread.run = &kernel.run_thread;
    thread.waits = false;
    thread.fiber->start([](void* self) { (*static_cast<Thread*>(self)->run)(); }, &thread);
    runnable[num_runnable++] = i;
  }
  running = {{0, 0, 0}, {index, 0, 0}, block, grid};
  unsigned left = num_threads;
  while (left > 0) {
    if (num_runnable == 0) die_of_deadlock();
    const auto at = static_cast<unsigned>(random.bits() % num_runnable);
    Thread& thread = threads[runnable[at]];
    runnable[at] = runnable[--num_runnable];
    running.thread = thread.index;
    now = &thread;
    thread.fiber->resume();
    now = nullptr;
    if (!thread.fiber->ended()) continue;
    --left;
    if (num_runnable == 0 && left > 0) try_block();
  }
}

}  // namespace

void register_kernel(const void* kernel, Binder binder, bool collective) {
  kernels()[kernel] = {binder, collective};
}

Bound bind_arguments(const void* kernel, void** arguments) {
  const auto found = kernels().find(kernel);
  if (found == kernels().end()) return {};
  Bound bound = found->second.first(kernel, arguments);
  bound.collective = found->second.second;
  return bound;
}

void run_block(const Bound& kernel, unsigned index, dim3 grid, dim3 block, std::uint64_t seed) {
  if (kernel.collective) {
    run_together(kernel, index, grid, block, seed);
    return;
  }
  const bool backwards = seed % 2 == 0;
  for (unsigned i = 0; i < block.x; ++i) {
    running = {{backwards ? block.x - 1 - i : i, 0, 0}, {index, 0, 0}, block, grid};
    kernel.run_thread();
  }
}

std::uint64_t meet(const Meeting& meeting) {
  Thread* const self = now;
  if (self == nullptr) {
    std::fprintf(stderr,
                 "kernel on the host: %s in a kernel that was launched with launch(): its threads "
                 "run one after the other, use launch_collective()\n",
                 meeting.call);
    std::abort();
  }
  const bool whole_block = meeting.kind == Meeting::Kind::kBlockBarrier;
  const unsigned lane = self->index.x % kWarp;
  const unsigned source_bit = meeting.kind == Meeting::Kind::kShuffle ? meeting.source : lane;
  if (!whole_block &&
      ((meeting.mask >> lane & 1U) == 0 || (meeting.mask >> source_bit & 1U) == 0)) {
    std::fprintf(stderr,
                 "kernel on the host: %s by lane %u with mask %08x, which does not name %s\n",
                 meeting.call, lane, meeting.mask,
                 (meeting.mask >> lane & 1U) == 0 ? "it" : "the lane that it reads");
    std::abort();
  }
  self->meeting = meeting;
  self->waits = true;
  if (whole_block) {
    try_block();
  } else {
    try_warp(*self);
  }
  self->fiber->stop();
  return self->answer;
}

}  // namespace hscache::cuda::host
