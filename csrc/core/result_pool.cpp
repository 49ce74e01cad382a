#include "core/result_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace hscache {
namespace {

constexpr int kSmallestPower = 12;
constexpr std::size_t kAlignment = 64;
// From here on memory is mapped, so that it goes back to the system at once; malloc keeps what is
// freed when more was freed before. Below, as many mappings as fit a large pool are more than the
// kernel grants a process.
constexpr std::int64_t kMapBytes = 256 << 10;
// From here on it lies in huge pages where the kernel has some: one page fault for 2 MiB, where
// small pages cost more to get than to write to.
constexpr std::size_t kHugePage = 2 << 20;

struct GiveToSystem {
  std::int64_t bytes = 0;
  void operator()(std::byte* memory) const noexcept {
    if (bytes >= kMapBytes) {
      munmap(memory, static_cast<std::size_t>(bytes));
    } else {
      std::free(memory);
    }
  }
};

using Memory = std::unique_ptr<std::byte, GiveToSystem>;

std::byte* map(std::size_t size) {
  void* const memory =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(memory);
}

// At an address where a huge page may begin.
std::byte* map_huge(std::size_t size) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  size = (size + page - 1) / page * page;
  const std::size_t spare = kHugePage - page;
  std::byte* const mapped = map(size + spare);
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(mapped) % kHugePage;
  if (head > 0) munmap(mapped, head);
  if (head < spare) munmap(mapped + head + size, spare - head);
  // Where the kernel has none the memory works as well, only slower at first.
  static_cast<void>(madvise(mapped + head, size, MADV_HUGEPAGE));
  return mapped + head;
}

Memory fresh_memory(std::int64_t bytes) {
  const auto size = static_cast<std::size_t>(bytes);
  std::byte* memory = nullptr;
  if (size >= kHugePage) {
    memory = map_huge(size);
  } else if (bytes >= kMapBytes) {
    memory = map(size);
  } else {
    memory = static_cast<std::byte*>(
        std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment));
    if (memory == nullptr) throw std::bad_alloc();
  }
  return Memory(memory, GiveToSystem{bytes});
}

void check_bytes(std::int64_t bytes) {
  if (bytes >= 1) return;
  throw std::invalid_argument("cannot take " + std::to_string(bytes) +
                              " bytes for a result: ask for 1 or more");
}

// The smallest size that holds `bytes`, counted from the smallest of all.
std::size_t size_index(std::int64_t bytes) {
  const auto last = static_cast<std::uint64_t>(bytes) - 1;
  if (last >> kSmallestPower == 0) return 0;
  const int power = std::bit_width(last) - 1;
  const std::uint64_t quarter = (last >> (power - 2)) - 4;
  return static_cast<std::size_t>(4 * (power - kSmallestPower)) + quarter + 1;
}

// `max_bytes` where that is less: a request that fits the limit is not refused for its rounding.
std::int64_t size_bytes(std::size_t index, std::int64_t max_bytes) {
  const std::size_t power = kSmallestPower + index / 4;
  const std::uint64_t bytes = (std::uint64_t{4} + index % 4) << (power - 2);
  return static_cast<std::int64_t>(std::min(bytes, static_cast<std::uint64_t>(max_bytes)));
}

}  // namespace

struct ResultBlock {
  Memory memory;
  std::size_t size = 0;         // index
  std::uint64_t came_back = 0;  // the when of it, among all that did

  std::int64_t bytes() const { return memory.get_deleter().bytes; }
};

namespace {

// By size; in each those that came back first come first.
using Idle = std::vector<std::list<ResultBlock>>;

}  // namespace

struct ResultPoolState {
  explicit ResultPoolState(std::int64_t max_bytes)
      : owner_pid(getpid()),
        max_bytes(max_bytes),
        idle(std::make_unique<Idle>(max_bytes > 0 ? size_index(max_bytes) + 1 : 0)) {}
  ~ResultPoolState() {
    // Leaks on purpose in a forked child: another thread may have been half-way through a list.
    if (forked()) static_cast<void>(idle.release());
  }
  ResultPoolState(const ResultPoolState&) = delete;
  ResultPoolState& operator=(const ResultPoolState&) = delete;

  bool forked() const { return getpid() != owner_pid; }

  const int owner_pid;
  const std::int64_t max_bytes;
  std::mutex mutex;  // guards what follows
  std::unique_ptr<Idle> idle;
  std::int64_t in_use_bytes = 0;
  std::int64_t idle_bytes = 0;
  std::uint64_t returns = 0;
  std::int64_t hits = 0;
  std::int64_t misses = 0;
  std::int64_t fallbacks = 0;
};

namespace {

// Moves the idle buffer that came back first out of the pool.
void evict_one(ResultPoolState& state, std::list<ResultBlock>& evicted) {
  std::list<ResultBlock>* oldest = nullptr;
  for (std::list<ResultBlock>& blocks : *state.idle) {
    if (blocks.empty()) continue;
    if (oldest == nullptr || blocks.front().came_back < oldest->front().came_back) {
      oldest = &blocks;
    }
  }
  state.idle_bytes -= oldest->front().bytes();
  evicted.splice(evicted.end(), *oldest, oldest->begin());
}

}  // namespace

ResultBuffer::ResultBuffer(std::weak_ptr<ResultPoolState> pool, std::list<ResultBlock> block,
                           std::int64_t bytes)
    : pool_(std::move(pool)), block_(std::move(block)), bytes_(bytes) {}

ResultBuffer::~ResultBuffer() {
  const std::shared_ptr<ResultPoolState> state = pool_.lock();
  if (state == nullptr || state->forked()) return;
  const std::lock_guard lock(state->mutex);
  ResultBlock& block = block_.front();
  block.came_back = state->returns++;
  state->in_use_bytes -= block.bytes();
  state->idle_bytes += block.bytes();
  std::list<ResultBlock>& blocks = (*state->idle)[block.size];
  blocks.splice(blocks.end(), block_);
}

std::byte* ResultBuffer::data() const { return block_.front().memory.get(); }

ResultPool::ResultPool(std::int64_t max_bytes)
    : state_(max_bytes < 0 ? throw std::invalid_argument("the result pool's limit is " +
                                                         std::to_string(max_bytes) +
                                                         " bytes: set hscache_result_bytes to 0 "
                                                         "or more")
                           : std::make_shared<ResultPoolState>(max_bytes)) {}

std::shared_ptr<ResultBuffer> ResultPool::take(std::int64_t bytes) {
  check_owner();
  check_bytes(bytes);
  ResultPoolState& state = *state_;
  std::list<ResultBlock> block;
  std::list<ResultBlock> evicted;
  std::size_t size = 0;
  std::int64_t whole_bytes = 0;
  {
    const std::lock_guard lock(state.mutex);
    if (bytes > state.max_bytes) {
      ++state.fallbacks;
      return nullptr;
    }
    size = size_index(bytes);
    whole_bytes = size_bytes(size, state.max_bytes);
    if (std::list<ResultBlock>& blocks = (*state.idle)[size]; !blocks.empty()) {
      block.splice(block.end(), blocks, std::prev(blocks.end()));
      state.idle_bytes -= whole_bytes;
      ++state.hits;
    } else if (whole_bytes <= state.max_bytes - state.in_use_bytes) {
      while (whole_bytes > state.max_bytes - state.in_use_bytes - state.idle_bytes) {
        evict_one(state, evicted);
      }
      ++state.misses;
    } else {
      ++state.fallbacks;
      return nullptr;
    }
    state.in_use_bytes += whole_bytes;
  }
  evicted.clear();
  try {
    if (block.empty()) block.push_back({fresh_memory(whole_bytes), size});
    return std::make_shared<ResultBuffer>(state_, std::move(block), bytes);
  } catch (const std::bad_alloc&) {
    const std::lock_guard lock(state.mutex);
    state.in_use_bytes -= whole_bytes;
    throw;
  }
}

std::shared_ptr<ResultBuffer> fresh_result(std::int64_t bytes) {
  check_bytes(bytes);
  std::list<ResultBlock> block;
  block.push_back({fresh_memory(bytes), 0});
  return std::make_shared<ResultBuffer>(std::weak_ptr<ResultPoolState>(), std::move(block), bytes);
}

ResultPoolStats ResultPool::stats() const {
  check_owner();
  const std::lock_guard lock(state_->mutex);
  return {.max_bytes = state_->max_bytes,
          .in_use_bytes = state_->in_use_bytes,
          .idle_bytes = state_->idle_bytes,
          .hits = state_->hits,
          .misses = state_->misses,
          .fallbacks = state_->fallbacks};
}

void ResultPool::check_owner() const {
  if (state_->forked()) {
    throw std::runtime_error(
        "the result pool belongs to the parent process: open a store after fork(), not before");
  }
}

}  // namespace hscache
