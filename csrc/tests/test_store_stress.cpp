// Threads that write, read and drop chunks of one pool as the store has them do it: the tree, the
// slot pools and the engines together. Rows tell which chunk, layer and token they are of.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/chunk_tree.h"
#include "core/transfer_engine.h"
#include "host/host_runtime.h"
#include "tests/harness.h"
#include "tests/layouts.h"

namespace hscache::test {
namespace {

using Id = ChunkTree::Id;
using Ids = std::vector<Id>;
using Key = std::uint64_t;
using Slots = std::vector<std::int64_t>;
using Layers = std::vector<std::int64_t>;
using Tickets = ChunkTree::Tickets;

constexpr Id kNone = ChunkTree::kNone;
constexpr int kThreads = 8;
constexpr std::int64_t kTokens = 4;  // of a chunk
constexpr std::int64_t kAllLayers = 3;
constexpr std::int64_t kDepth = 5;     // chunks of the longest prefix
constexpr std::int64_t kBranches = 3;  // 363 keys, room for a fifth of their layers
constexpr std::int64_t kRowBytes[] = {8192, 5120};
constexpr std::int64_t kFormats = 2;
constexpr std::int64_t kArenaBytes = 6 << 20;  // three extents

std::uint64_t mix(std::uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9U;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBU;
  return bits ^ (bits >> 31);
}

// The words of a row.
std::uint64_t first_word(Key key, std::int64_t layer, std::int64_t token) {
  return mix(key ^ mix(static_cast<std::uint64_t>(layer * kTokens + token) + 1));
}
void write_row(std::byte* row, std::int64_t bytes, std::uint64_t word) {
  for (std::int64_t i = 0; i < bytes; i += 8, ++word) std::memcpy(row + i, &word, 8);
}
bool is_row(const std::byte* row, std::int64_t bytes, std::uint64_t word) {
  for (std::int64_t i = 0; i < bytes; i += 8, ++word) {
    if (std::memcmp(row + i, &word, 8) != 0) return false;
  }
  return true;
}

// Waits for all; whether none failed.
bool arrive(const Tickets& tickets) {
  bool well = true;
  for (const auto& ticket : tickets) {
    ticket->wait(std::nullopt);
    well &= ticket->state() == Ticket::State::kDone;
  }
  return well;
}

// What a store has: keys over a tree, under a lock, and what moves rows.
struct Store {
  Store() {
    for (const std::int64_t bytes : kRowBytes) {
      pools.push_back(std::make_shared<SlotPool>(arena, bytes * kTokens));
      tree.add_format(pools.back());
    }
  }

  // Under the lock.
  Id find(Key key) const {
    const auto found = ids.find(key);
    return found == ids.end() ? kNone : found->second;
  }
  void name(Key key, Id id) {
    ids[key] = id;
    CHECK(keys.emplace(id, key).second);
  }
  void follow() {
    for (const auto& [from, to] : tree.take_changes()) {
      const auto named = keys.find(from);
      if (!CHECK(named != keys.end())) return;
      const Key key = named->second;
      keys.erase(named);
      ids.erase(key);
      if (to != kNone) name(key, to);
    }
  }
  void tend() {
    tree.settle();
    follow();
  }
  Id add(Key key, std::optional<Key> parent_key) {
    Id parent = kNone;
    if (parent_key) {
      parent = find(*parent_key);
      if (parent == kNone) name(*parent_key, parent = tree.add_absent());
    }
    const Id before = find(key);
    const Id id = tree.add(before, parent);
    if (before == kNone) name(key, id);
    return id;
  }
  std::optional<Slots> allocate(int format, std::int64_t count) {
    auto slots = tree.allocate(format, count);
    follow();
    return slots;
  }
  void retire(int format, Slots slots, const Tickets& tickets) {
    tree.retire(format, std::move(slots), tickets);
    follow();
  }

  // Without it.
  std::byte* row(int format, std::int64_t slot, std::int64_t token) const {
    const PagedView view = pools[static_cast<std::size_t>(format)]->view(kRowBytes[format]);
    return view.data + view.offset(slot, 0, token);
  }

  std::shared_ptr<Arena> arena = std::make_shared<Arena>(kArenaBytes);
  std::vector<std::shared_ptr<SlotPool>> pools;  // by format
  std::mutex mutex;
  ChunkTree tree;
  std::unordered_map<Key, Id> ids;
  std::unordered_map<Id, Key> keys;
  // Every limit is met now and then.
  TransferEngine writing{std::make_unique<HostRuntime>(), {2, 6, 16 * kRowBytes[0]}};
  TransferEngine reading{std::make_unique<HostRuntime>(), {2, 4, 16 * kRowBytes[0]}};

  std::atomic<bool> wrong{false};
  std::atomic<std::int64_t> rows_checked{0};
  std::atomic<std::int64_t> rows_of_dropped{0};  // that were read after their chunk was dropped
  std::atomic<std::int64_t> failed{0};
  std::atomic<std::int64_t> found_full{0};
};

// One of a request's chunks, as hidden_cache/writer.py has them.
struct Chunk {
  Key key = 0;
  std::optional<Key> parent;
  Id number = kNone;                                // pinned
  std::map<std::int64_t, std::int64_t> slots = {};  // by layer; its writer's own until committed
  Tickets tickets = {};                             // into them
};

class Worker {
 public:
  Worker(Store& store, std::uint64_t seed) : store_(store), random_(seed) {}

  void work() {
    const std::int64_t draw = random_.in(1, 100);
    if (draw <= 40) return write();
    if (draw <= 85) return read();
    disturb();
  }
  void end() {
    const std::lock_guard lock(store_.mutex);
    give_back();
  }

 private:
  std::vector<Key> draw_path() {
    std::vector<Key> path;
    Key key = 0;
    for (std::int64_t left = random_.in(1, kDepth); left > 0; --left) {
      path.push_back(key = mix(key + static_cast<Key>(random_.in(1, kBranches))));
    }
    return path;
  }
  Layers draw_layers() {
    Layers layers;
    while (layers.empty()) {
      for (std::int64_t layer = 0; layer < kAllLayers; ++layer) {
        if (random_.chance(60)) layers.push_back(layer);
      }
    }
    random_.shuffle(layers);
    return layers;
  }

  void expect(bool right) {
    if (!CHECK(right)) store_.wrong = true;
  }

  // Reads a layer of chunks whose rows are there, through the engine or right out of the pool.
  void check_rows(std::span<const Key> keys, std::int64_t layer, const ChunkTree::Run& run) {
    const std::int64_t bytes = kRowBytes[run.format];
    const auto count = std::ssize(run.slots);
    std::vector<std::byte> target;
    if (random_.chance(50)) {
      target.resize(static_cast<std::size_t>(count * kTokens * bytes));
      TransferRequest scatter{.direction = Direction::kScatter,
                              .paged = {.data = target.data(),
                                        .num_blocks = count,
                                        .num_layers = 1,
                                        .block_size = kTokens,
                                        .row_bytes = bytes,
                                        .block_stride = kTokens * bytes,
                                        .layer_stride = kTokens * bytes,
                                        .token_stride = bytes},
                              .block_ids = {},
                              .pieces = {}};
      for (std::int64_t i = 0; i < count; ++i) {
        scatter.block_ids.push_back(i);
        std::byte* rows = store_.row(run.format, run.slots[static_cast<std::size_t>(i)], 0);
        scatter.pieces.push_back({.start = i * kTokens, .length = kTokens, .layers = {rows}});
      }
      const auto ticket = store_.reading.submit(std::move(scatter), Backpressure::kWait);
      if (random_.chance(10)) ticket->cancel();
      if (!arrive({ticket})) return;
    }
    for (std::int64_t i = 0; i < count * kTokens; ++i) {
      const auto chunk = static_cast<std::size_t>(i / kTokens);
      const std::byte* row = target.empty() ? store_.row(run.format, run.slots[chunk], i % kTokens)
                                            : target.data() + i * bytes;
      expect(is_row(row, bytes, first_word(keys[chunk], layer, i % kTokens)));
      ++store_.rows_checked;
    }
  }
  void check_rows(std::span<const Key> keys, std::int64_t layer,
                  const std::vector<ChunkTree::Run>& runs) {
    std::size_t first = 0;
    for (const auto& run : runs) {
      check_rows(keys.subspan(first, run.slots.size()), layer, run);
      first += run.slots.size();
    }
  }

  // --- reading ---

  void read() {
    const std::vector<Key> path = draw_path();
    const Layers layers = draw_layers();
    Ids ids;
    std::vector<std::vector<ChunkTree::Run>> runs;
    {
      const std::lock_guard lock(store_.mutex);
      store_.tend();
      for (const Key key : path) ids.push_back(store_.find(key));
      ids.resize(store_.tree.pin_prefix(ids, layers));
      for (const std::int64_t layer : layers) runs.push_back(store_.tree.runs(ids, layer));
    }
    for (std::size_t i = 0; i < layers.size(); ++i) check_rows(path, layers[i], runs[i]);
    const std::lock_guard lock(store_.mutex);
    for (const Id id : ids) store_.rows_of_dropped += !store_.tree.present(id);
    store_.tree.unpin(ids);
  }

  // --- dropping ---

  // What takes the others' room.
  void give_back() {
    if (!hoard_.empty()) store_.retire(hoarded_, std::exchange(hoard_, {}), {});
  }

  void disturb() {
    const std::lock_guard lock(store_.mutex);
    store_.tend();
    if (random_.chance(2)) {
      store_.tree.remove_all();
    } else if (random_.chance(30)) {
      for (const Key key : draw_path()) {
        const Id id = store_.find(key);
        if (id != kNone && store_.tree.present(id) && random_.chance(60)) store_.tree.remove(id);
        store_.follow();
      }
    } else if (random_.chance(30)) {
      store_.tree.evict();
    } else {
      give_back();
      hoarded_ = draw_format();
      hoard_ = store_.allocate(hoarded_, random_.in(1, 60)).value_or(Slots{});
    }
    store_.follow();
  }

  // --- writing ---

  int draw_format() { return static_cast<int>(random_.in(0, kFormats - 1)); }

  void write() {
    const std::vector<Key> path = draw_path();
    const Layers layers = draw_layers();
    const int format = draw_format();
    std::vector<Chunk> chunks;
    for (const Key key : path) {
      chunks.push_back({key, chunks.empty() ? std::nullopt : std::optional(chunks.back().key)});
    }
    if (!open(chunks, layers, format)) {
      ++store_.found_full;
      return;
    }
    std::vector<std::byte> source = rows_of(chunks, layers, format);
    Tickets all;
    const std::int64_t tokens = std::ssize(chunks) * kTokens;
    std::int64_t taken = 0;
    while (taken < tokens && !random_.chance(3)) {
      const std::int64_t stop = std::min(tokens, taken + random_.in(1, 9));
      TransferRequest gather = gather_of(source, chunks, layers, format, taken, stop);
      const std::lock_guard lock(store_.mutex);
      store_.tend();
      std::shared_ptr<Ticket> ticket;
      if (!gather.pieces.empty()) {
        ticket = store_.writing.submit(std::move(gather), Backpressure::kRefuse);
        if (!ticket) continue;
        all.push_back(ticket);
        if (random_.chance(4)) ticket->cancel();
      }
      for (std::int64_t i = taken / kTokens; i * kTokens < stop; ++i) {
        Chunk& chunk = chunks[static_cast<std::size_t>(i)];
        if (chunk.slots.empty()) continue;
        std::erase_if(chunk.tickets,
                      [](const auto& t) { return t->state() == Ticket::State::kDone; });
        chunk.tickets.push_back(ticket);
        if ((i + 1) * kTokens <= stop) commit(chunk, format);
      }
      taken = stop;
    }
    if (taken == tokens && random_.chance(50)) read_back(chunks, path, layers, format, all);
    let_go(chunks, format);
    store_.failed += !arrive(all);  // the source is read until then
  }

  // A place for all rows, or none.
  bool open(std::vector<Chunk>& chunks, const Layers& layers, int format) {
    const std::lock_guard lock(store_.mutex);
    store_.tend();
    for (Chunk& chunk : chunks) {
      const Id id = store_.find(chunk.key);
      if (id == kNone || !store_.tree.present(id)) continue;
      store_.tree.pin(id);
      chunk.number = id;
    }
    for (const std::int64_t layer : layers) {
      std::vector<Chunk*> wanting;
      for (Chunk& chunk : chunks) {
        if (!store_.tree.missing(chunk.number, Layers{layer}).empty()) wanting.push_back(&chunk);
      }
      const auto slots = store_.allocate(format, std::ssize(wanting));
      if (!slots) {
        let_go_locked(chunks, format);
        return false;
      }
      for (std::size_t i = 0; i < wanting.size(); ++i) wanting[i]->slots[layer] = (*slots)[i];
    }
    return true;
  }

  // `[chunk, layer, token]` rows.
  static std::vector<std::byte> rows_of(const std::vector<Chunk>& chunks, const Layers& layers,
                                        int format) {
    const std::int64_t bytes = kRowBytes[format];
    std::vector<std::byte> rows(chunks.size() * layers.size() *
                                static_cast<std::size_t>(kTokens * bytes));
    std::byte* row = rows.data();
    for (const Chunk& chunk : chunks) {
      for (const std::int64_t layer : layers) {
        for (std::int64_t token = 0; token < kTokens; ++token, row += bytes) {
          write_row(row, bytes, first_word(chunk.key, layer, token));
        }
      }
    }
    return rows;
  }

  TransferRequest gather_of(std::vector<std::byte>& source, const std::vector<Chunk>& chunks,
                            const Layers& layers, int format, std::int64_t begin,
                            std::int64_t stop) {
    const std::int64_t bytes = kRowBytes[format];
    TransferRequest gather{.direction = Direction::kGather,
                           .paged = {.data = source.data(),
                                     .num_blocks = std::ssize(chunks),
                                     .num_layers = std::ssize(layers),
                                     .block_size = kTokens,
                                     .row_bytes = bytes,
                                     .block_stride = std::ssize(layers) * kTokens * bytes,
                                     .layer_stride = kTokens * bytes,
                                     .token_stride = bytes},
                           .block_ids = {},
                           .pieces = {}};
    for (std::int64_t i = 0; i < std::ssize(chunks); ++i) {
      gather.block_ids.push_back(i);
      const Chunk& chunk = chunks[static_cast<std::size_t>(i)];
      const std::int64_t first = std::max(begin, i * kTokens);
      const std::int64_t length = std::min(stop, (i + 1) * kTokens) - first;
      if (length <= 0 || chunk.slots.empty()) continue;
      RowsPiece piece{.start = first, .length = length, .layers = {}};
      for (const std::int64_t layer : layers) {
        const auto slot = chunk.slots.find(layer);
        piece.layers.push_back(slot == chunk.slots.end()
                                   ? nullptr
                                   : store_.row(format, slot->second, first - i * kTokens));
      }
      gather.pieces.push_back(std::move(piece));
    }
    return gather;
  }

  // Makes a chunk everybody's whose rows are all on their way. Under the lock.
  void commit(Chunk& chunk, int format) {
    ChunkTree& tree = store_.tree;
    Id number = store_.find(chunk.key);
    const bool present = number != kNone && tree.present(number);
    if (chunk.number != kNone && !(present && number == chunk.number)) return;
    if (present && chunk.number == kNone) {
      for (const auto& [layer, slot] : chunk.slots) {
        if (!tree.holds(number, layer)) return;
      }
    } else if (!present) {
      number = store_.add(chunk.key, chunk.parent);
    }
    if (chunk.number == kNone) {
      tree.pin(number);
      chunk.number = number;
    }
    std::vector<ChunkTree::LayerSlot> added;
    Slots surplus;
    for (const auto& [layer, slot] : chunk.slots) {
      if (tree.missing(number, Layers{layer}).empty()) {
        surplus.push_back(slot);
      } else {
        added.push_back({layer, slot});
      }
    }
    if (!added.empty()) tree.fill(number, format, added, chunk.tickets);
    if (!surplus.empty()) store_.retire(format, std::move(surplus), chunk.tickets);
    chunk.slots.clear();
  }

  // All rows of a request that holds them, its own or shared, dropped meanwhile or not.
  void read_back(const std::vector<Chunk>& chunks, const std::vector<Key>& path,
                 const Layers& layers, int format, const Tickets& own) {
    Ids numbers;
    for (const Chunk& chunk : chunks) {
      if (chunk.number != kNone) numbers.push_back(chunk.number);
    }
    Tickets others;
    {
      const std::lock_guard lock(store_.mutex);
      store_.tend();
      others = store_.tree.tickets(numbers, layers);
    }
    const bool well = arrive(others);
    if (!arrive(own) || !well) return;
    for (const std::int64_t layer : layers) {
      for (std::size_t i = 0; i < chunks.size(); ++i) {
        const auto slot = chunks[i].slots.find(layer);
        std::vector<ChunkTree::Run> runs;
        if (slot != chunks[i].slots.end()) {
          runs.push_back({format, {slot->second}});
        } else {
          const std::lock_guard lock(store_.mutex);
          runs = store_.tree.runs(Ids{chunks[i].number}, layer);
        }
        check_rows(std::span(path).subspan(i, 1), layer, runs);
      }
    }
  }

  void let_go(std::vector<Chunk>& chunks, int format) {
    const std::lock_guard lock(store_.mutex);
    let_go_locked(chunks, format);
  }
  void let_go_locked(std::vector<Chunk>& chunks, int format) {
    Ids numbers;
    for (const Chunk& chunk : chunks) {
      if (chunk.number != kNone) numbers.push_back(chunk.number);
    }
    store_.tree.unpin(numbers);
    for (const Chunk& chunk : chunks) {
      Slots slots;
      for (const auto& [layer, slot] : chunk.slots) slots.push_back(slot);
      if (!slots.empty()) store_.retire(format, std::move(slots), chunk.tickets);
    }
  }

  Store& store_;
  Random random_;
  Slots hoard_;
  int hoarded_ = 0;  // of this format
};

std::uint64_t seed_of_run() {
  const char* given = std::getenv("HSCACHE_SEED");
  return given == nullptr ? std::random_device{}() : std::strtoull(given, nullptr, 10);
}

}  // namespace

// HSCACHE_STRESS_S says for how long, HSCACHE_SEED what is drawn; who comes first is the machine's
// choice.
TEST(store_stress, no_row_is_wrong_and_no_slot_is_lost) {
  const std::uint64_t seed = seed_of_run();
  const char* given = std::getenv("HSCACHE_STRESS_S");
  const std::chrono::duration<double> length(given == nullptr ? 3.0 : std::strtod(given, nullptr));
  const auto start = std::chrono::steady_clock::now();
  Store store;
  std::vector<std::thread> threads;
  for (int id = 0; id < kThreads; ++id) {
    threads.emplace_back([&, id] {
      Worker worker(store, mix(seed + static_cast<std::uint64_t>(id)));
      try {
        while (!store.wrong && std::chrono::steady_clock::now() - start < length) worker.work();
        worker.end();
      } catch (const std::exception& error) {
        store.wrong = true;
        report_failure(__FILE__, __LINE__, std::string("a thread ended early: ") + error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  store.writing.drain();
  store.reading.drain();
  store.tend();
  bool fine = CHECK(!store.wrong) && CHECK(store.rows_checked > 0);
  store.tree.remove_all();
  store.follow();
  fine &= CHECK_EQ(store.tree.size(), 0);
  fine &= CHECK(store.ids.empty());
  for (const auto& pool : store.pools) fine &= CHECK_EQ(pool->stats().used, 0);
  std::printf(
      "       %lld rows checked, %lld chunks dropped under a reader, %lld evicted, %lld "
      "requests failed, %lld found it full\n",
      static_cast<long long>(store.rows_checked), static_cast<long long>(store.rows_of_dropped),
      static_cast<long long>(store.tree.num_evicted()), static_cast<long long>(store.failed),
      static_cast<long long>(store.found_full));
  if (!fine) report_failure(__FILE__, __LINE__, "HSCACHE_SEED=" + std::to_string(seed));
}

}  // namespace hscache::test
